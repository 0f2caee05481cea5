"""vLLM in a process of its own, with or without speculation: one JSON object on each line in, one on each line out.

Run by `benchmarks/vllm_peers.py`, by path and with nothing of the kit imported: its Python may be of another
environment.
"""

import json
import os
import sys
import time


def main() -> None:
    """Reads {"model", "dtype", "max_length", "rows", "speculation", "more"}, then any number of
    {"prompts", "max_new_tokens"}; answers {"version"}, then {"tokens", "seconds"} for each."""
    # vLLM and what it starts print to stdout; keep the real one for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    settings = json.loads(sys.stdin.readline())
    engine = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=settings["rows"],
        speculative_config=settings["speculation"],
        enforce_eager=True,  # compiling takes longer than a run
        enable_prefix_caching=False,  # a repeat must read its prompt again, as the others do
        disable_log_stats=True,
        **settings["more"],
    )
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        # Every answer is as long: the end-of-turn token is one like any other.
        sampling = vllm.SamplingParams(temperature=0, max_tokens=request["max_new_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers)


if __name__ == "__main__":
    main()
