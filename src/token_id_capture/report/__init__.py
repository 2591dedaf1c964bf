"""Pages to look at: one rollout, or all of a database. Plain data in, one self-contained HTML file out.

A page loads nothing: styles and scripts stand in it, named by their hashes in its content security
policy, and whatever comes from the database is escaped or packed. ``rollout_page`` and
``overview_page`` decide what is shown, ``render`` turns it into HTML with the templates beside it.
"""
