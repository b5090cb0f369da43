"""Run by CI in a fresh environment, outside the checkout: the installed wheel works as a whole."""

import json
import subprocess
import sys

import torch
import transformers

import fastbert
from fastbert import dispatch, extension


def main() -> None:
    assert "site-packages" in fastbert.__file__, fastbert.__file__
    assert extension.load() is None, extension.load()
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    config._attn_implementation = "eager"
    theirs = transformers.BertForMaskedLM(config).eval()
    ours = fastbert.BertForMaskedLM(config).eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(5, 99, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = ids.masked_fill((ids % 3 != 0) | (mask == 0), -100)
    mine, reference = (m(ids, attention_mask=mask, labels=labels) for m in (ours, theirs))
    torch.testing.assert_close(mine.loss, reference.loss)
    mine.loss.backward()
    ran = {backend for (op, backend) in dispatch.counters() if op == "linear_gelu_fwd"}
    assert ran == {"cpu"}, ran
    report = subprocess.run(
        [sys.executable, "-m", "fastbert", "env", "--json"], capture_output=True, check=True
    )
    assert {row["op"] for row in json.loads(report.stdout)["ops"]} >= {"attention_fwd", "unpad"}
    print("wheel: ok")


main()
