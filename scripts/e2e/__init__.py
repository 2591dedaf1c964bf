"""Real engines behind the gateway: what ``scripts/e2e-vllm`` and ``scripts/e2e-llama-server`` share."""
