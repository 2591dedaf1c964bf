"""Real agent harnesses through the gateway, against an engine that follows a script."""
