"""Pages to look at: one rollout as a conversation, or all of a database. Plain data in, one HTML file out.

``reading`` reads, ``rollout``, ``overview`` and ``listing`` decide what is shown, ``model`` is the form of it, and
``page`` puts it into a file that loads nothing. The live page of ``view`` gives the same data to the same scripts,
which stand in ``assets``.
"""
