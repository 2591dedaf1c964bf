"""A capture database in Datasette (https://datasette.io): read-only, with queries to begin with.

``queries`` is what is offered, ``plugin`` makes cells and SQL readable, ``site`` puts them together.
Needs the extra ``browse``.
"""
