"""Open a new database with the installed package, write one call, and read it back.

scripts/try-wheel runs this outside the checkout. Usage: new_database.py DIRECTORY
"""

import asyncio
import sys
from importlib import resources
from pathlib import Path

import token_id_capture
from token_id_capture import TokenCaptureStore, TokenEntry


async def write_and_read(directory: Path) -> None:
    entry = TokenEntry(
        rollout_id="wheel-0",
        model_call_id="call-0",
        prompt_token_ids=[1, 2],
        generation_token_ids=[3],
        generation_log_probs=[-0.5],
    )
    async with TokenCaptureStore(directory) as store:
        await store.put(entry)
        snapshot = await store.freeze(entry.rollout_id)
    assert snapshot.entries == (entry,)
    assert not snapshot.incomplete


def main() -> None:
    package = Path(token_id_capture.__file__).parent
    assert Path(__file__).parent.parent not in package.parents, f"{package} is the checkout, not the installed wheel"
    assert resources.files("token_id_capture").joinpath("migrations/versions").is_dir(), "no migrations in the wheel"
    asyncio.run(write_and_read(Path(sys.argv[1])))
    print(f"a new database in {sys.argv[1]}, made by {package}")


if __name__ == "__main__":
    main()
