"""Keep the event log: the effects of every step on requests and blocks, in memory and in a file.

This room handles records: their names, numbers and order. It imports neither scheduler nor block
tables. Scheduler and memory emit records here, and `mie.events.replay` rebuilds their state.
"""

from mie.events.file import read_log as read_log
from mie.events.log import SNAPSHOT_EVERY as SNAPSHOT_EVERY
from mie.events.log import EventLog as EventLog
from mie.events.vocabulary import FIELDS as FIELDS
from mie.events.vocabulary import MAX_FORCED_RUN as MAX_FORCED_RUN
from mie.events.vocabulary import SUMMARY_FIELDS as SUMMARY_FIELDS
from mie.events.vocabulary import Record as Record
from mie.events.vocabulary import Segment as Segment
from mie.events.vocabulary import Seq as Seq
from mie.events.vocabulary import Snapshot as Snapshot
from mie.events.vocabulary import Step as Step
from mie.events.vocabulary import Summary as Summary
from mie.events.vocabulary import summary_of as summary_of
