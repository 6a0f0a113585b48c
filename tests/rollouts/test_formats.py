"""Rollouts of each framework become the same samples; what has no token ids, or would run code, is refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.rollouts.formats import read_rollout

ROUTES = np.arange(12, dtype=np.int32).reshape(3, 2, 2) % 4


def _npy(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


# All of them: prompt 1 5, response 9 7, log-probabilities -0.7 -0.2.
DOCUMENTS: dict[str, Any] = {
    "verl": {
        "prompts": [[0, 1, 5]], "responses": [[9, 7, 0]], "rollout_log_probs": [[-0.7, -0.2, 0.0]],
        "response_mask": [[1, 1, 0]],
    },
    "verl's agent loop": {"prompt_ids": [1, 5], "response_ids": [9, 7], "response_logprobs": [-0.7, -0.2]},
    "TRL": {"prompt_ids": [[1, 5]], "completion_ids": [[9, 7]], "logprobs": [[-0.7, -0.2]]},
    "OpenRLHF": {
        "sequences": [[1, 5, 9, 7, 0]], "action_mask": [[0, 1, 1, 0]], "rollout_log_probs": [[0.0, -0.7, -0.2, 0.0]],
    },
    "NeMo-RL": {
        "token_ids": [1, 5, 9, 7, 0], "input_lengths": 4, "token_loss_mask": [0, 0, 1, 1, 0], "sample_loss_mask": 1.0,
        "generation_logprobs": [0, 0, -0.7, -0.2, 0],
    },
    "slime or miles": {
        "rollout_id": 3,
        "samples": [
            {"tokens": [1, 5, 9, 7], "response_length": 2, "rollout_log_probs": [-0.7, -0.2], "loss_mask": [1, 1]}
        ],
    },
    "vLLM": {
        "prompt_token_ids": [1, 5],
        "outputs": [{"token_ids": [9, 7], "logprobs": [{"9": {"logprob": -0.7}, "4": {"logprob": -0.9}}, {"7": -0.2}]}],
    },
    "OpenAI's protocol": {
        "choices": [
            {
                "prompt_token_ids": [1, 5],
                "logprobs": {"tokens": ["token_id:9", "token_id:7"], "token_logprobs": [-0.7, -0.2]},
            }
        ]
    },
    "SGLang": {
        "text": "",
        "meta_info": {
            "input_token_logprobs": [[None, 1, None], [-1.0, 5, None]],
            "output_token_logprobs": [[-0.7, 9, None], [-0.2, 7, None]],
            "weight_version": "3",
        },
    },
    "plain lists": {"prompt_ids": [[1, 5]], "response_ids": [[9, 7]], "logprobs": [[-0.7, -0.2]]},
    "plain arrays": {"token_ids": [[1, 5, 9, 7]], "logprobs": [[0, 0, -0.7, -0.2]], "mask": [[0, 0, 1, 1]]},
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_format_gives_the_same_samples(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DOCUMENTS[name]))
    found = read_rollout(tmp_path / "a.json")
    assert found.format == name
    (one,) = found.samples
    assert (one.prompt, one.response) == ([1, 5], [9, 7])
    assert one.logprobs.tolist() == pytest.approx([-0.7, -0.2])
    assert found.versions == (["3"] if name == "SGLang" else [])


def test_lines_are_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(2 * (json.dumps(DOCUMENTS["NeMo-RL"]) + "\n"))
    assert len(read_rollout(tmp_path / "a.jsonl").samples) == 2


def test_files_of_tensors(tmp_path: Path) -> None:
    verl = {key: torch.tensor(value) for key, value in DOCUMENTS["verl"].items()}
    torch.save({"batch": verl, "meta_info": {"temperature": 0.7}}, tmp_path / "a.pt")
    arrays = {key: np.array(value) for key, value in DOCUMENTS["plain arrays"].items()}
    np.savez(tmp_path / "a.npz", **arrays)
    save_file({key: torch.from_numpy(value) for key, value in arrays.items()}, tmp_path / "a.safetensors")
    found = [read_rollout(tmp_path / name) for name in ("a.pt", "a.npz", "a.safetensors")]
    assert [one.samples[0].response for one in found] == 3 * [[9, 7]]
    assert [one.temperature for one in found] == [0.7, None, None]


def test_prompts_of_vllm_are_responses_to_their_first_token(tmp_path: Path) -> None:
    document = {
        "prompt_token_ids": [1, 5, 9],
        "prompt_logprobs": [None, {"5": {"logprob": -1.0}}, {"9": {"logprob": -2.0}}],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    (one,) = read_rollout(tmp_path / "a.json").samples
    assert (one.prompt, one.response, one.logprobs.tolist()) == ([1], [5, 9], [-1.0, -2.0])


@pytest.mark.parametrize("text", [_npy(ROUTES), base64.b64encode(ROUTES.tobytes()).decode()])
def test_experts_in_base_64(text: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(DOCUMENTS["OpenAI's protocol"]))
    document["choices"][0]["routed_experts"] = text
    (tmp_path / "a.json").write_text(json.dumps(document))
    routes = read_rollout(tmp_path / "a.json").samples[0].routes
    assert routes is not None and routes.reshape(3, 2, 2).tolist() == ROUTES.tolist()


def test_tokens_of_tools_have_no_log_probability(tmp_path: Path) -> None:
    document = {**DOCUMENTS["plain lists"], "mask": [[1, 0]]}
    (tmp_path / "a.json").write_text(json.dumps(document))
    assert read_rollout(tmp_path / "a.json").num_tokens == 1


def test_an_answer_that_leaves_tokens_out_is_left_out(tmp_path: Path) -> None:
    content = [{"id": 9, "logprob": -0.7}, {"id": 7, "logprob": -0.2}]
    answers = [
        {
            "choices": [{"prompt_token_ids": [1, 5], "logprobs": {"content": content}}],
            "usage": {"completion_tokens": number},
        }
        for number in (2, 3)
    ]
    (tmp_path / "a.json").write_text(json.dumps(answers))
    found = read_rollout(tmp_path / "a.json")
    assert len(found.samples) == 1 and "fewer log-probabilities" in found.notes[0]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"input": "a", "output": "b", "score": 1.0, "step": 3}, "has no token ids"),
        ({"prompt": "a", "logprobs": [1]}, "has no token ids"),
        ({"a": 1}, "no known format"),
        ({"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}]}, "has no token ids"),
        ({"prompt_ids": [[1]], "response_ids": [[2]], "logprobs": [[None]]}, "no log-probability"),
        ({"prompt_ids": [[1]], "response_ids": [[2, 3]], "logprobs": [[-1.0]]}, "another number"),
        ({"prompt_ids": [[1]], "response_ids": [["a"]], "logprobs": [[-1.0]]}, "whole numbers"),
        ({"prompt_ids": [[1]], "response_ids": [[2]], "logprobs": [["a"]]}, "is a number"),
        ({**DOCUMENTS["slime or miles"], "samples": [3]}, "is an object"),
        ([], "no known format"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(document: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(GlassError, match=words):
        read_rollout(tmp_path / "a.json")


class _Planted:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_pickles_do_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"batch": _Planted()}, tmp_path / "a.pt")
    with pytest.raises(CorruptError, match="would run code"):
        read_rollout(tmp_path / "a.pt")
    assert "ran" not in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_rollout(tmp_path / "a.json")
