"""A reward that asks the service `judge` (docs/services.md), and waits for it while it is started again."""

import http.client
import json
import os
import time
from collections.abc import Sequence


def score(_prompts: Sequence[str], responses: Sequence[str], _answers: Sequence[str]) -> list[float]:
    # `host:port`; several with commas between them where the service has several nodes.
    place = os.environ["VERL_SLURM_SERVICE_JUDGE"].split(",")[0]
    headers = {"Authorization": f"Bearer {os.environ['VERL_SLURM_SERVICE_TOKEN']}"}
    for _ in range(600):
        connection = http.client.HTTPConnection(place, timeout=60)
        try:
            connection.request("POST", "/", json.dumps(list(responses)), headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise RuntimeError(f"the judge at {place} says {answer.status} {answer.reason}")
            scores: list[float] = json.load(answer)
            return scores
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        finally:
            connection.close()
    raise RuntimeError(f"no judge at {place} for a minute")
