"""The vLLM side of `zerogap bench rollout`: a script for the python of an environment that has vLLM, without zerogap.

    python -I vllm_side.py FOLDER DTYPE eager|compile MAX_NUM_SEQS MAX_MODEL_LEN KV_BYTES

It speaks the protocol of serve.py: ready, then one answer per request; what vLLM prints goes to stderr. Every sampled
token's log-probability is asked for, as RL needs it; tokenizer and detokenizer are left out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, dtype, mode, *numbers = sys.argv[1:]
    max_num_seqs, max_model_len, kv_bytes = map(int, numbers)
    threads = int(os.environ["OMP_NUM_THREADS"])

    import vllm

    engine = vllm.LLM(
        model=folder,
        dtype=dtype,
        enforce_eager=mode == "eager",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=kv_bytes,
        seed=0,
    )
    _send(answers, {"vllm": vllm.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        began, processor_began = time.perf_counter(), time.process_time()
        sampled = _generate(vllm, engine, **request)
        wall, processor = time.perf_counter() - began, time.process_time() - processor_began
        seconds = processor if threads == 1 else wall
        _send(answers, {"seconds": seconds, "cpu_share": processor / wall / threads, "sampled": sampled})


def _generate(vllm: Any, engine: Any, prompts: list[list[int]], samples: int, new_tokens: int) -> int:
    """Number of tokens sampled."""
    sampling = vllm.SamplingParams(
        n=samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def _send(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
