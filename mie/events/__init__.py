"""Keep the event log: what every step did to requests and blocks, in memory and in a file.

This room knows records: their names, numbers and order. It knows neither scheduler nor block
tables. Those emit records here, and `mie.replay` rebuilds their state from them.
"""

from mie.events.file import read_log
from mie.events.log import SNAPSHOT_EVERY, EventLog
from mie.events.vocabulary import (
    FIELDS,
    MAX_FORCED_RUN,
    SUMMARY_FIELDS,
    Record,
    Segment,
    Seq,
    Snapshot,
    Step,
    Summary,
    summary_of,
)

__all__ = [
    "FIELDS",
    "MAX_FORCED_RUN",
    "SNAPSHOT_EVERY",
    "SUMMARY_FIELDS",
    "EventLog",
    "Record",
    "Segment",
    "Seq",
    "Snapshot",
    "Step",
    "Summary",
    "read_log",
    "summary_of",
]
