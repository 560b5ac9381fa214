"""Implement ``mie digest``: one digest of fixed requests, equal on every CPU."""

import argparse
import json
from dataclasses import asdict


def run(args: argparse.Namespace) -> int:
    """Print the digests of each setting, and one of all."""
    from mie.lab.digest import Row, digest_of, digest_rows

    def line(row: Row) -> str:
        shown = f"refused: {row.refused}" if row.refused else f"{row.alone[:16]} {row.batch[:16]}"
        return f"{row.name:<16} {shown}"

    for model in args.models or ["bundled"]:
        if not args.json:
            print(f"{model}\n{'settings':<16} {'alone':<16} together")
        rows = []
        for row in digest_rows(model, args.backend, args.only or ()):
            rows.append(row)
            if not args.json:
                print(line(row), flush=True)
        digest = digest_of(rows)
        if args.json:
            found = {"model": model, "digest": digest, "rows": [*map(asdict, rows)]}
            print(json.dumps(found), flush=True)
        else:
            print(f"{'digest':<16} {digest}")
    return 0
