"""Write rows to files for other programs.

``destination`` says what an output is from its name, ``writer`` writes rows to it: as lines of JSON (``jsonl``) or as
Parquet (``parquet``), packed (``compression``), in one file or in shards, on this machine (``whole_files``) or behind
a URL (``remote``). Files appear under their names together, when all of them are whole. ``columns`` has the columns
that are known beforehand, ``shapes`` finds the types of others.
"""
