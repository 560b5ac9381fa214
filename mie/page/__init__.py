"""Turn an event log into cells that the web page only has to assign.

This room handles records and their replay, and writes JSON and HTML. It imports neither an engine
nor HTTP. The page in ``web/`` has none of the allocator's rules. docs/page.md has the format.
"""
