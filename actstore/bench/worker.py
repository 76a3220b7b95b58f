"""Process of one row: ``python -m actstore.bench.worker``.

Requests are lines of JSON on standard input, answers lines of JSON on standard output, one for one:

==========================================================  ==================================================
``{"do": "start", "workload": .., "row": .., "disk_path"}``  ``{"losses": [..]}`` of the steps that warmed up
``{"do": "step"}``                                          ``{"ms": .., "loss": ..}``
``{"do": "peaks"}``                                         memory of the steps so far
``{"do": "check"}``                                         gradient error, bytes saved and held; ends training
==========================================================  ==================================================

An answer ``{"error": ..}``, or ``{"left_out": ..}`` where the row has no meaning for the model, ends the process; so
does the end of standard input.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from actstore.bench.peers import NotApplicable
from actstore.bench.peers.rows import Row
from actstore.bench.trainer import Trainer
from actstore.bench.workloads.workload import Workload


def _answer(request: dict[str, Any], trainer: Trainer | None) -> tuple[dict[str, Any], Trainer]:
    if trainer is None:
        work, row = Workload.from_dict(request["workload"]), Row(**request["row"])
        trainer = Trainer(work, row, request["disk_path"])
        return {"losses": trainer.start()}, trainer
    if request["do"] == "step":
        elapsed_ms, loss = trainer.step()
        return {"ms": elapsed_ms, "loss": loss}, trainer
    return trainer.peaks() if request["do"] == "peaks" else trainer.check(), trainer


def main() -> int:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that output of libraries stays out of the answers
    trainer: Trainer | None = None
    for line in sys.stdin:
        try:
            answer, trainer = _answer(json.loads(line), trainer)
        except NotApplicable as reason:
            answer = {"left_out": str(reason)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.keys() & {"error", "left_out"}:
            return 1
    if trainer is not None:
        trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
