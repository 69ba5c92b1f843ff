"""Rows of `hone serve`: a client asks, and the answers show each key."""

from __future__ import annotations

from tests.config.row import Row
from tests.config.walk_rows.shared import (
    engine_rows,
    model_rows,
    run_rows,
    sampling_rows,
    served_image_rows,
)

SERVE: dict[str, Row] = {
    **run_rows(trains=False, has_dir=False),
    "run.seed": Row("1", "answers"),
    **model_rows("answers", lora=False, chat=()),
    **served_image_rows(),
    **engine_rows("answers", generates=True),
    **sampling_rows("generation", "answers"),
    "generation.stop": Row("['0', '1', '2', '3', '4', '5', '6', '7', '+', '*']", "answers"),
    "serve.host": Row("127.0.0.2", "answers"),
    "serve.port": Row("61918", "answers"),
    "serve.key_file": Row("kept.key", "files"),
    "serve.model_name": Row("mine", "answers"),
    "serve.max_model_len": Row("12", "answers"),
    "serve.max_sessions": Row("1", "answers"),
    "serve.session_timeout_s": Row("1e-9", "answers", ("--serve.max_sessions=1",)),
    "serve.max_requests": Row("2", "Handover"),
    "serve.max_body_mib": Row("0.00001", "answers"),
}
