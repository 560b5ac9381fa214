"""Turn an event log into what the web page shows: cells that it only has to assign.

This room knows records and their replay, and writes JSON and HTML. It knows neither an engine nor
HTTP. The page in ``web/`` knows none of the allocator's rules. docs/page.md has the format.
"""
