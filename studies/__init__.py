"""Questions that klamp asked of its own trainer, with plans, tables and pictures: `python -m studies.NAME`."""
