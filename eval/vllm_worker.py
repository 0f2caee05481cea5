"""vLLM in a process of its own: one JSON object on each line in, one on each line out.

Run by `eval/peers.py`, by path and with nothing of the kit imported, so that whatever vLLM does to its
process (threads, signal handlers, forks, output) stays in it.
"""

import json
import os
import sys
import time


def main() -> None:
    """Reads {"model", "dtype", "max_length", "stop"}, then any number of {"ids", "max_new_tokens"}."""
    # vLLM and what it starts print to stdout; keep the real one for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    settings = json.loads(sys.stdin.readline())
    engine = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=1,
        enforce_eager=True,  # compiling takes longer than a run
        enable_prefix_caching=False,  # a repeat must read its prompt again, as the others do
        disable_log_stats=True,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=request["max_new_tokens"], stop_token_ids=settings["stop"]
        )
        start = time.perf_counter()
        [output] = engine.generate({"prompt_token_ids": request["ids"]}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        reply = {"tokens": list(output.outputs[0].token_ids), "seconds": seconds}
        print(json.dumps(reply), file=answers)


if __name__ == "__main__":
    main()
