"""The benchmark behind ``scripts/bench``: our store against plain JSON lines, on the same calls.

Read it in this order: ``workloads`` (which agents), ``inputs`` (the JSON bytes that an engine would
send for them), ``stores`` (what is compared), ``child`` (one measured run, in a process of its own),
``campaign`` (repeats, interleaved, and their medians), ``limits`` (what must be reached),
``report``. ``scale``, ``memory``, ``writers`` and ``gateway`` measure one question each.
"""
