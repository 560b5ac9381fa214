"""Renew tests/data/answers.json: answers with reasoning and calls, as transformers reads them.

    pip install "transformers>=5.23"
    python scripts/make_parsing_golden.py

The file has each format of mie as a response template, and texts. To add one, write it there with
an empty message. Each text is parsed again with its template. PyTorch is not needed.
"""

import datetime
import json
import platform
from pathlib import Path

import transformers
from transformers.utils.chat_parsing import parse_response

ANSWERS = Path(__file__).parents[1] / "tests/data/answers.json"


def main() -> None:
    """Parse every text, and write the messages."""
    content = json.loads(ANSWERS.read_text(encoding="utf-8"))
    for case in content["cases"]:
        template = content["templates"][case["format"]]
        case["message"] = parse_response(case["text"], template, prefix="")
    content["provenance"] = {
        "by": "scripts/make_parsing_golden.py",
        "on": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "transformers": transformers.__version__,
    }
    ANSWERS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
