"""Run public suites on mie, and compare the figures with published ones.

    make scoreboard
    python -m scripts.scoreboard [--quick] [--only SUITE] [--data DIR] [--models DIR]

The rows are written to docs/scoreboard.json and docs/scoreboard.md.

To write a suite, add a file to `scripts/scoreboard/suites/`. The name of the file is the name of
the suite, and the file assigns `SUITE`:

    from ..case import Case, Row, Run, Suite    # and mie, numpy, the standard library

    def measure(run: Run) -> Iterator[Row]:
        right, lines = ..., ...         # reads run.path("wiki.test.raw"); calls run.progress
        yield Row.compared(
            "lines of wikitext that decode to themselves",
            f"{right} of {lines}", "all", right == lines, source="https://…",
        )

    CASES = (Case("wikitext", measure, inputs=("wiki.test.raw",), packages=("torch",)),)
    SUITE = Suite(title="Round trips", text="A paragraph for the page.", cases=CASES)

* A *case* is a computation that yields rows. It is the unit of resuming: its rows are kept in
  build/scoreboard/ until the code of mie, the file of the suite, an input or the interpreter
  changes. Files of `suites/` whose names begin with an underscore are shared by suites. Cut a long
  suite into cases of some minutes.
* A case names its inputs and the packages that it imports. `measure` imports the packages, so that
  the file of the suite can be imported everywhere. If an input or a package is missing, the
  framework writes a row "skipped" with the remedy.
* `inputs.json` has the sha256 and the public address of each input. Add the file there, and write
  the page again with `--page`. `run.path(NAME)` is the path of the file. The folder may have
  NAME.xz in place of NAME.
* If a case raises a `MieError`, the framework adds a row "refused" with the message, and the name
  of the case. Other exceptions become rows "failed", and the exit code is 1. A case that expects a
  refusal in the middle yields `Row.refused(question, reason)` itself.
* `Row.compared` has a figure to reach, and the verdict "reached" or "missed". `Row.stated` has
  a figure without a target.
* `question` identifies a row and does not change between runs: numbers stand in `ours`. A row is
  the same on each run but for times.
* With `run.is_quick` a case computes a part, and `ours` has the size of the part. All cases
  together take at most 5 minutes on two quiet cores, so a suite has about 20 seconds.
  `is_in_quick=False` leaves a case out of quick runs.
"""
