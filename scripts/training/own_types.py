"""Rows in trainers' own types, whose definitions run without the rest of the trainer.

Trainers need GPUs, Ray and gigabytes to be imported, and their types and loaders do not: of each source file only
the named definitions are executed, and those imports that are there. A trainer that is not installed, or whose
repository cannot be reached, is skipped and named.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from token_id_capture.integrations import nemo_rl, prime_rl, skyrl, slime, verl

PACKAGES = Path(sysconfig.get_path("purelib"))


def definitions(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """The named classes and functions of a file, methods among them as functions; ``given`` stands for others."""
    tree = ast.parse(path.read_text())
    module = ModuleType(f"definitions_of_{path.stem}")
    sys.modules[module.__name__] = module  # where dataclasses and pydantic look for annotations
    vars(module).update(given)
    wanted = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names
    ]
    for node in [ast.parse("from __future__ import annotations").body[0], *_imports(tree), *wanted]:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        body = [ast.parse("from __future__ import annotations").body[0], node]
        code = compile(ast.Module(body, []), str(path), "exec")  # type: ignore[arg-type]
        with contextlib.suppress(ImportError):  # of the rest of the trainer
            exec(code, vars(module))
    return {name: vars(module)[name] for name in names}


def _imports(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (type(node)(**{**vars(node), "names": [alias]}) for alias in node.names)


def verl_outputs(rows: list[dict[str, Any]], _: Path) -> int:
    """verl's ``AgentLoopOutput``, and the tensors that it makes of one."""
    path = PACKAGES / "verl" / "experimental" / "agent_loop" / "agent_loop.py"
    output = definitions(path, "AgentLoopMetrics", "AgentLoopOutput")["AgentLoopOutput"]
    for row in rows:
        tensors = output(**verl.agent_loop_output(row)).as_dict()
        assert tensors["responses"].shape == tensors["response_mask"].shape == tensors["rollout_log_probs"].shape
        assert int(tensors["response_mask"].sum()) == sum(row["loss_mask"])
    return len(rows)


def skyrl_outputs(rows: list[dict[str, Any]], _: Path) -> int:
    """SkyRL's ``GeneratorOutput`` and ``TrajectoryID``, checked by its own ``validate_generator_output``."""
    base = PACKAGES / "skyrl" / "train" / "generators" / "base.py"
    types = definitions(base, "TrajectoryID", "GeneratorOutput")
    names = ("validate_generator_output", "_validate_per_token_side_channels", "_validate_step_wise_fields")
    checks = definitions(
        PACKAGES / "skyrl" / "train" / "utils" / "trainer_utils.py",
        *names,
        SAMPLE_SUPPORT_FIELD="rollout_sample_support",
        logger=SimpleNamespace(warning=print),
    )
    output = skyrl.generator_output(rows)
    assert output.keys() <= types["GeneratorOutput"].__annotations__.keys()
    output["trajectory_ids"] = [types["TrajectoryID"](*pair) for pair in output["trajectory_ids"]]
    checks["validate_generator_output"](len(rows), output, step_wise=True)
    return len(rows)


def prime_rl_samples(rows: list[dict[str, Any]], sources: Path) -> int:
    """prime-rl's ``TrainingSample``, encoded and decoded as it travels, which checks the types."""
    import msgspec

    path = sources / "prime-rl" / "src" / "prime_rl" / "transports" / "rollouts" / "types.py"
    sample = definitions(path, "EncodedTensor", "RoutedExperts", "TrainingSample")["TrainingSample"]
    for row in rows:
        given = sample(**prime_rl.training_sample(row, 0.5, "math"))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=sample) == given
        assert sum(given.mask) == sum(row["loss_mask"])
    return len(rows)


def slime_samples(rows: list[dict[str, Any]], sources: Path) -> int:
    """slime's ``Sample``, and back."""
    sample = definitions(sources / "slime" / "slime" / "utils" / "types.py", "Sample")["Sample"]
    for number, row in enumerate(rows):
        made = sample.from_dict(slime.sample(row, index=number))
        assert isinstance(made.rollout_id, int)
        assert made.effective_response_length == sum(made.loss_mask) == sum(row["loss_mask"])
        assert sample.from_dict(made.to_dict()) == made
        assert not vars(made).keys() - sample.__dataclass_fields__.keys()
    return len(rows)


def nemo_rl_data(rows: list[dict[str, Any]], sources: Path) -> int:
    """NeMo-RL's ``DatumSpec``, and its flattening of messages."""
    data = sources / "nemo-rl" / "nemo_rl" / "data"
    spec = definitions(data / "interfaces.py", "DatumSpec", LLMMessageLogType=list, VLMMessageLogType=list)
    name = "message_log_to_flat_messages"
    given = {"PackedTensor": type("PackedTensor", (), {}), "Tensor": torch.Tensor}
    flatten = definitions(data / "llm_message_utils.py", name, "_validated_packed_values", **given)[name]
    for row in rows:
        datum = nemo_rl.datum(row)
        assert spec["DatumSpec"].__required_keys__ <= datum.keys() | {"__extra__", "task_name", "stop_strings"}
        log = [{key: tensor(value) for key, value in message.items()} for message in datum["message_log"]]
        flat = flatten(log)
        assert flat["token_ids"].tolist() == (row["token_ids"] if len(row["token_ids"]) > 1 else [0, 0])
        assert datum["loss_multiplier"] == float(not row["mask_sample"])
    return len(rows)


def tensor(value: Any) -> Any:
    """A list as the tensor that a trainer makes of it."""
    return torch.tensor(value) if isinstance(value, list) else value


def nemo_rl_records(records: list[dict[str, Any]], sources: Path) -> int:
    """Records through the code with which NeMo-RL reads what NeMo Gym returns: every one has generated tokens."""
    path = sources / "nemo-rl" / "nemo_rl" / "environments" / "nemo_gym.py"
    name = "_postprocess_nemo_gym_to_nemo_rl_result"
    found = definitions(
        path,
        name,
        "_is_trainable_output_item",
        extract_input_image_sources_from_responses_messages=lambda messages: [],
        _detect_invalid_tool_call_and_malformed_thinking=lambda item, **options: (False, False),
    )
    tokenizer = SimpleNamespace(batch_decode=lambda rows: [""] * len(rows))
    for record in records:
        result = {**copy.deepcopy(record), "responses_create_params": {"input": []}}
        read = found[name](SimpleNamespace(cfg={}, _processor=None), {}, result, tokenizer)
        answers = [message for message in read["message_log"] if message["role"] == "assistant"]
        assert answers
        assert all(len(one["token_ids"]) == len(one["generation_logprobs"]) for one in answers)
        assert read["full_result"].get("mask_sample") == record.get("mask_sample")
    return len(records)


def load(rows: list[dict[str, Any]], records: list[dict[str, Any]], sources: Path) -> dict[str, int | str]:
    """How many rows, or records, each trainer's own type took; else why it could not be asked."""
    asked: dict[str, tuple[Callable[[list[dict[str, Any]], Path], int], list[dict[str, Any]]]] = {
        "verl AgentLoopOutput": (verl_outputs, rows),
        "SkyRL GeneratorOutput": (skyrl_outputs, rows),
        "prime-rl TrainingSample": (prime_rl_samples, rows),
        "slime Sample": (slime_samples, rows),
        "NeMo-RL DatumSpec": (nemo_rl_data, rows),
        "NeMo-RL's reader of NeMo Gym's records": (nemo_rl_records, records),
    }
    taken: dict[str, int | str] = {}
    for name, (ask, given) in asked.items():
        try:
            taken[name] = ask(given, sources)
        except FileNotFoundError as missing:
            taken[name] = f"skipped, not here: {missing.filename}"
    return taken
