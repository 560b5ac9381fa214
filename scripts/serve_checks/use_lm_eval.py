"""Score a small local task through lm-eval's ``local-completions`` with the remote tokenizer.

python use_lm_eval.py URL KEY

If torch and transformers are installed, transformers scores the same task from the same directory,
and every log-likelihood must be equal within 1e-3.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELDOUT = ROOT / "tests" / "data" / "tiny_heldout.jsonl"
MODEL = ROOT / "mie" / "assets" / "tiny"
TOLERANCE = 1e-3
TASK = """\
task: stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
"""


def write_task(directory: Path, count: int = 16) -> None:
    """Write a task: which of four sentences continues a story."""
    texts = [json.loads(line)["reference"] for line in HELDOUT.read_text().splitlines()[:count]]
    parts = [text[: len(text) // 2].rsplit(" ", 1)[0] for text in texts]
    rests = [
        text[len(part) : len(part) + 80].rsplit(" ", 1)[0]
        for text, part in zip(texts, parts, strict=True)
    ]
    data = directory / "stories.jsonl"
    with data.open("w") as file:
        for i, part in enumerate(parts):
            choices = [rests[(i + k) % count] for k in range(4)]
            answer = i % 4
            choices[0], choices[answer] = choices[answer], choices[0]
            row = {"context": part[-300:], "choices": choices, "answer": answer}
            file.write(json.dumps(row) + "\n")
    (directory / "stories.yaml").write_text(TASK.format(data=data))


def scores(directory: Path, name: str, *arguments: str) -> tuple[dict[str, float], list[float]]:
    """Run lm-eval: the results, and the log-likelihood of every choice."""
    output = directory / name
    command = [sys.executable, "-m", "lm_eval", "run", "--tasks", "stories"]
    command += ["--include_path", str(directory), "--output_path", str(output), "--log_samples"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(directory / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([*command, *arguments], check=True, env=environment)
    [results] = output.rglob("results_*.json")
    [samples] = output.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"]["stories"]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    likelihoods = [float(each[0]) for row in rows for each in row["filtered_resps"]]
    return {name: found[f"{name},none"] for name in ("acc", "acc_norm")}, likelihoods


def main() -> None:
    url, key = sys.argv[1:]
    os.environ["OPENAI_API_KEY"] = key
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_task(directory)
        served, ours = scores(
            directory,
            "served",
            "--model",
            "local-completions",
            "--model_args",
            f"base_url={url}/v1/completions,model=bundled,tokenizer_backend=remote,"
            f"num_concurrent=4,max_length=1024,auth_token={key}",
        )
        print(f"served: {served}, {len(ours)} log-likelihoods")
        if importlib.util.find_spec("torch") is None:
            print("torch is not installed, so that nothing was compared")
            return
        plain, theirs = scores(
            directory,
            "transformers",
            "--model",
            "hf",
            "--model_args",
            f"pretrained={MODEL},dtype=float32,add_bos_token=False",  # as local-completions does
            "--device",
            "cpu",
        )
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"transformers: {plain}, the largest difference of a log-likelihood is {worst:.2e}")
        assert served == plain
        assert worst < TOLERANCE


if __name__ == "__main__":
    main()
