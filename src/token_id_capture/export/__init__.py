"""Captured sequences as files for other programs. Reads only; a rollout of any state stays as it is.

``rows`` makes rows of a rollout, ``record_fields`` adds what the rollout's record says, ``jsonl`` and
``parquet`` write them, ``compression`` packs them, and ``run`` goes through a database; ``dataset`` gives them to
programs. One rollout is in memory at a time.
"""
