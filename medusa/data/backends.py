"""What answers prompts in bulk: vLLM where it is installed, the kit's own engine elsewhere.

Both take an iterator of `Request` and yield each `Completion` when it ends, in any order. Requests are drawn
only when there is room for one more, so memory does not grow with the data and a request may depend on
earlier completions: an iterator that yields None has nothing yet and is asked again once something has ended.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from medusa.base import Base
from medusa.errors import MedusaError
from medusa.generation import Completion, Request, generate

_END: Any = object()


class Backend(Protocol):
    """Answers requests.

    Attributes:
        name: "vllm" or "engine".
        gives_hidden: whether `Request.want_hidden` is honoured.
        max_length: most tokens of a prompt and its answer together.
    """

    name: str
    gives_hidden: bool
    max_length: int

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Yields one completion for each request, in the order in which they end.

        Raises:
            MedusaError: a prompt is empty or leaves no room for an answer.
        """
        ...


def open_backend(
    base: Base,
    name: str = "auto",
    *,
    in_flight: int | None = None,
    max_length: int = 2048,
    dtype: str | None = None,
) -> Backend:
    """Opens a backend by name.

    Args:
        base: for "engine" with its weights loaded; "vllm" loads them itself, from `base.path`.
        name: "vllm", "engine", or "auto": vLLM where it is installed.
        in_flight: requests answered at a time; None: the backend's own default.
        max_length: most tokens of a prompt and its answer together; the base's context bounds it.
        dtype: vLLM's, "float32" or "bfloat16"; None: as the base was saved. The engine has the base's own.

    Raises:
        MedusaError: there is no such backend, or vLLM was asked for and is not installed.
    """
    max_length = min(max_length, base.max_length)
    if name == "auto":
        name = "vllm" if importlib.util.find_spec("vllm") else "engine"
    if name == "vllm":
        return VllmBackend(base, in_flight=in_flight or 64, max_length=max_length, dtype=dtype or "auto")
    if name == "engine":
        return EngineBackend(base, in_flight=in_flight or 16, max_length=max_length)
    raise MedusaError(f"there is no backend called {name!r}; choose auto, vllm or engine")


class VllmBackend:
    """vLLM in this process: nothing is left behind when it is killed, and each step is ours to interleave.

    Args:
        base: only its path and its end-of-turn tokens are used.
        in_flight: requests answered at a time.
        max_length: most tokens of a prompt and its answer together.
        dtype: "auto", "float32" or "bfloat16". On CPUs without bf16 instructions float32 is several times
            faster.
        engine_args: anything else that `vllm.LLM` takes.

    Raises:
        MedusaError: vLLM is not installed.
    """

    name = "vllm"
    gives_hidden = False

    def __init__(
        self,
        base: Base,
        *,
        in_flight: int = 64,
        max_length: int = 2048,
        dtype: str = "auto",
        **engine_args: Any,
    ):
        # vLLM reads these when it is imported. The user's own settings win.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")  # GiB
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            from vllm import LLM, SamplingParams
            from vllm.platforms import current_platform
        except ImportError as error:
            raise MedusaError(
                f"vLLM cannot be imported ({error}); install medusa-kit[vllm] (on CPUs: "
                "requirements-vllm.lock), or use the engine backend"
            ) from error
        self._params = SamplingParams
        # vLLM 0.32 on CPUs: a seeded request in a batch whose prefill is cut in chunks ends in "CPU Generator
        # does not use offset". There the engine's seed is the only one, and a resumed run samples other
        # answers.
        self._takes_seeds = not current_platform.is_cpu()
        self._llm = LLM(
            str(base.path),
            dtype=dtype,
            max_model_len=max_length,
            max_num_seqs=in_flight,
            enable_prefix_caching=True,
            **{"enforce_eager": True, "seed": 0, **engine_args},
        )
        self._eos_ids = sorted(base.eos_ids)
        self.in_flight, self.max_length = in_flight, max_length

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """See `Backend.complete`."""
        engine, waiting = self._llm.llm_engine, iter(requests)
        flying: dict[str, Request] = {}
        serial, more = 0, True
        try:
            while more or flying:
                while more and len(flying) < self.in_flight:
                    request = next(waiting, _END)
                    if request is None:
                        break
                    if request is _END:
                        more = False
                        break
                    name = str(serial)
                    serial += 1
                    params = self._sampling(request)
                    (prompt,) = engine.renderer.render_cmpl([{"prompt_token_ids": list(request.ids)}])
                    engine.add_request(name, prompt, params)
                    flying[name] = request
                if not flying:
                    if more:
                        raise MedusaError(
                            "no request is in flight and none is ready: the source of requests is stuck"
                        )
                    break
                for output in engine.step():
                    if output.finished:
                        yield self._completion(flying.pop(output.request_id), output.outputs[0])
        finally:
            engine.abort_request(list(flying))

    def _sampling(self, request: Request) -> Any:
        room = self.max_length - len(request.ids)
        if not request.ids or room < 1:
            raise MedusaError(
                f"a prompt has {len(request.ids)} tokens and the context holds {self.max_length}; shorten it"
            )
        rules = request.sampling
        return self._params(
            temperature=rules.temperature,
            top_p=rules.top_p,
            top_k=rules.top_k,
            repetition_penalty=rules.repetition_penalty,
            logit_bias=dict(rules.logit_bias) or None,
            seed=rules.seed if self._takes_seeds and rules.temperature > 0 else None,
            max_tokens=min(request.max_new_tokens, room),
            stop=list(request.stop),
            stop_token_ids=self._eos_ids,
            skip_special_tokens=True,
        )

    @staticmethod
    def _completion(request: Request, answer: Any) -> Completion:
        return Completion(
            key=request.key,
            token_ids=list(answer.token_ids),
            finish="stop" if answer.finish_reason == "stop" else "length",
            text=answer.text,
        )


class EngineBackend:
    """The kit's own engine, decoding plainly, with its last hidden states for the taking.

    Args:
        base: with its weights loaded.
        in_flight: rows of the engine.
        max_length: most tokens of a prompt and its answer together.
    """

    name = "engine"
    gives_hidden = True

    def __init__(self, base: Base, *, in_flight: int = 16, max_length: int = 2048):
        from medusa.decoding import Engine

        if base.model is None:
            raise MedusaError("the engine backend needs the base's weights; open it with load_base")
        self._base = base
        self._engine = Engine(base.model, batch=in_flight, max_length=max_length)
        self.in_flight, self.max_length = in_flight, max_length

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """See `Backend.complete`."""
        base = self._base
        return generate(self._engine, requests, eos_ids=base.eos_ids, tokenizer=base.tokenizer, reuse=True)
