"""A checkpoint, opened: found, its files checked, and read as the reference that loaded models are compared with.

Only transformers' configs and tokenizers and the formulas in `rope.py` are used, no torch and no mlx: so every host
gets the same reference from the same files. Of weight files only headers and sizes are read, so opening is quick for a
model of any size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from disagg.api.keeper import ModelFacts
from disagg.api.layout import Layout, SplitLayout
from disagg.api.status import Evidence, PreflightFinding
from disagg.config import EngineOptions
from disagg.engines.model.architectures import architecture_of, layers_of
from disagg.engines.model.architectures.base import Convolved
from disagg.engines.model.architectures.weights import stated_tie
from disagg.engines.model.profile import ModelProfile, Rope, layout_of, verdict
from disagg.engines.model.text import HFTokenizer
from disagg.errors import ModelError, first_line
from disagg.kv.fingerprint import Fingerprint, short_hash
from disagg.planning.checkpoint import facts, read_object, weights_form
from disagg.planning.refusals import (
    damaged,
    for_context,
    known_as,
    longest_context,
    refusal_of_context,
    refusal_of_vllm,
    refusal_of_weights,
)

INDEX: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000  # the bound of the safetensors format
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HINT: Final = "download the model again"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded engine: backend, package versions, the model's profile, layout and fingerprint, and its preflight.
    evidence: its likeliest tokens after a fixed text, from its warm-up. weights: their form, in words; empty if it is
    not known. mixture: it has experts, of which a token uses some. audits: it can audit received KV. split: how its
    layers can be divided between hosts. loaded: only the first so many of them are loaded; None: all. facts: what the
    model's files say of it."""

    backend: str  # e.g. "transformers/cuda", "mlx/cpu"
    versions: dict[str, str]  # package -> version
    profile: ModelProfile
    layout: Layout
    fingerprint: Fingerprint
    split: SplitLayout
    preflight: tuple[PreflightFinding, ...] = ()
    memory_bytes: int = 0  # weights, as loaded
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    evidence: Evidence | None = None
    kv_bytes: int | None = None  # KV of prompts that it has memory for, if it knows
    weights: str = ""
    mixture: bool = False
    audits: bool = False
    loaded: int | None = None
    facts: ModelFacts | None = None

    @property
    def digest(self) -> str:
        """12 hexadecimal digits: of the model, its weights as they are loaded, and the packages that compute it."""
        likeliest = self.evidence.likeliest if self.evidence else ()
        parts = (
            self.backend,
            sorted(self.versions.items()),
            self.fingerprint,
            self.weights,
            self.memory_bytes,
            likeliest,
        )
        return short_hash(repr(parts).encode())[:12]

    def cannot_compute(self, layers: int | None) -> str:
        """Why this engine does not compute the model's first `layers` layers, None for all of them; empty if it
        does."""
        count = self.split.layers
        wanted = count if layers is None else layers
        if not 0 < wanted <= count:
            return f"the model has {count} layers: its first {wanted} cannot be computed"
        if wanted < count and self.split.refusal:
            return f"the model cannot be divided between hosts: {self.split.refusal}"
        if self.loaded is not None and wanted > self.loaded:
            return f"only the first {self.loaded} of the model's {count} layers are loaded here"
        return ""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the files of a checkpoint describe. path: its folder. config: its config.json. text_config: transformers'
    configuration of the text model, which in a multimodal checkpoint is the part that reads text."""

    path: Path
    config: Mapping[str, Any]
    text_config: Any
    tokenizer: HFTokenizer
    profile: ModelProfile

    @classmethod
    def open(cls, source: str | Path, context: int | None, default: int = 1) -> Self:
        """The checkpoint in folder (or hub id) `source`, served with `context` tokens: if None, with as many as it
        reads, or `default` if it does not state how many.

        ModelError, with the reason, if it is missing or damaged, or if its KV cannot be handed over."""
        path = find(source)
        text_config = _text_config(path, context)
        longest, vocabulary = _sizes(text_config, path)
        config = read_object(path / "config.json")
        layers = layers_of(text_config, path, str(config.get("model_type")))
        if context is not None and (why := refusal_of_context(text_config, context)):
            raise ModelError(f"{path}: {why}", f"set context to {longest} or less")
        tokenizer = HFTokenizer.load(path, configuration(path))
        profile = ModelProfile(
            source="checkpoint",
            architecture=str(text_config.model_type),
            vocab_size=vocabulary,
            context=context or longest or default,
            layers=layers,
            tokenizer=tokenizer.digest,
            chat_template=tokenizer.chat_template_digest,
            special_tokens=tokenizer.special_tokens_digest,
            eos_ids=tokenizer.eos_ids,
            tied=text_config.tie_word_embeddings,
        )
        return cls(path, config, text_config, tokenizer, profile)

    def layout(self, dtype: str) -> Layout:
        """The layout of its KV with keys and values in `dtype`."""
        return layout_of(self.profile.layers, dtype)

    @property
    def convolved(self) -> Convolved:
        """What the states of its layers consist of."""
        return architecture_of(self.text_config).convolved(self.text_config)

    @property
    def split(self) -> SplitLayout:
        """How its layers can be divided between hosts."""
        config = self.text_config
        architecture = architecture_of(config)
        return SplitLayout(
            layers=int(config.num_hidden_layers),
            places=architecture.places(config),
            hidden=int(config.hidden_size),
            refusal=architecture.split(config),
        )

    @property
    def fingerprint(self) -> Fingerprint:
        """Rotary frequencies are compared to six significant digits."""
        profile = self.profile
        return Fingerprint(
            architecture=profile.architecture,
            vocab_size=profile.vocab_size,
            rope=short_hash("\n".join(_rope_text(layer.rope) for layer in profile.layers).encode()),
            tokenizer=profile.tokenizer,
            chat_template=profile.chat_template,
            special_tokens=profile.special_tokens,
        )

    def weights(self, dtype: str, quantization: str | None = None) -> str:
        """The form of its weights in an engine, in words."""
        return weights_form(self.config, dtype, quantization)

    def verdict(self, actual: ModelProfile, patched: Sequence[PreflightFinding] = ()) -> tuple[PreflightFinding, ...]:
        """What a loaded model computes differently from this checkpoint, by `profile.verdict`."""
        return verdict(self.profile, actual, patched)

    def info(
        self,
        actual: ModelProfile,
        preflight: tuple[PreflightFinding, ...],
        dtype: str,
        *,
        backend: str,
        versions: dict[str, str],
        memory_bytes: int = 0,
        kv_bytes: int | None = None,
        weights: str = "",
        mixture: bool = False,
        loaded: int | None = None,
    ) -> EngineInfo:
        """What an engine with this model states about itself. The layout has the reference's layers, not the measured
        ones: if the context fits a window, "full" and "sliding" keep the same rows, and both hosts must use the same
        name."""
        return EngineInfo(
            backend=backend,
            versions=versions,
            profile=actual,
            layout=self.layout(dtype),
            fingerprint=self.fingerprint,
            split=self.split,
            preflight=preflight,
            memory_bytes=memory_bytes,
            eos_ids=self.profile.eos_ids,
            kv_bytes=kv_bytes,
            weights=weights,
            mixture=mixture,
            loaded=loaded,
            facts=facts(self.path),
        )

    def loaded(self, options: EngineOptions) -> int | None:
        """How many of the model's layers are to be loaded, None for all. ModelError if it has not so many, or a host
        with the first ones is of no use."""
        layers, split = options.first_layers, self.split
        if layers is None or layers == split.layers:
            return None
        if layers > split.layers:
            reason = (
                f'{self.path}: the model has {split.layers} layers, not the {layers} of layers = "{options.layers}"'
            )
            raise ModelError(reason, f"set layers to less than {split.layers}, or leave it out for all")
        if split.refusal:
            reason = f"{self.path}: the model cannot be divided between hosts: {split.refusal}"
            raise ModelError(reason, "leave layers out, and load all of it")
        return layers

    def described(self, loaded: int | None) -> ModelProfile:
        """The profile of its first `loaded` layers, None for all."""
        return self.profile if loaded is None else self.profile.first(self.split.count(loaded))

    def require_readable(self, engine: str) -> None:
        """ModelError if this engine cannot read its weights as they are packed."""
        if why := refusal_of_weights(self.config, engine):
            raise ModelError(f"{self.path}: {why}", "name another checkpoint as this engine's source in hosts.toml")

    def require_for_vllm(self, device: str, ranks: int) -> None:
        """ModelError if vLLM, on this device and so many ranks that share the heads, computes the model otherwise than
        the other frameworks."""
        self.require_readable("vllm")
        if why := refusal_of_vllm(self.text_config, device, ranks):
            raise ModelError(f"vLLM cannot prefill it: {why}", "use the engine transformers for this model")


def find(source: str | Path) -> Path:
    """The folder of a checkpoint: `source` itself, or a hub id's snapshot (downloaded if it is not cached).
    ModelError if it is missing or damaged."""
    path = Path(source).expanduser()
    if not path.is_dir():
        if path.exists() or not _HUB_ID.fullmatch(str(source)):
            raise ModelError(
                f"{source}: no such model folder",
                "give a folder with config.json, or a hub id owner/name; on a host of a fleet, run disagg models pull "
                "(disagg deploy copies models that are folders)",
            )
        path = _download(str(source))
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json", "a model folder has config.json, weights and tokenizer files")
    check_weights(path)
    return path


def _rope_text(rope: Rope | None) -> str:
    return "none" if rope is None else " ".join(f"{x:.6g}" for x in (rope.scale, *rope.inv_freq))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:  # the hub's errors are OSErrors; a bad id is a ValueError
        return Path(snapshot_download(hub_id, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{hub_id}: not in the local cache and not downloaded: {first_line(error)}",
            "check the id and the network, or give a folder; on hosts of a fleet: disagg models pull",
        ) from error


def configuration(path: Path) -> Any:
    """transformers' configuration of the checkpoint in this folder, also after vLLM has put a class of its own in place
    of transformers' (kimi_linear, deepseek_v32). ValueError if transformers does not know its type: code that a
    checkpoint brings is never run."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    body = read_object(path / "config.json")
    stated = body.get("model_type")
    name = known_as(str(stated))
    if stated and name not in CONFIG_MAPPING:
        raise ValueError(f"it does not know the model type {name!r}")
    own = getattr(transformers, CONFIG_MAPPING_NAMES[name]) if name in CONFIG_MAPPING_NAMES else None
    if own is not None and (name != stated or CONFIG_MAPPING[name] is not own):
        return own.from_dict({**body, "model_type": name})
    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def _text_config(path: Path, context: int | None) -> Any:
    file = path / "config.json"
    if why := damaged(read_object(file)):
        raise ModelError(f"{file}: {why}", "compare it with the model's original")
    try:
        whole = configuration(path)
        text = whole.get_text_config(decoder=True)
        text.tie_word_embeddings = stated_tie(read_object(path / "config.json"), whole)
        if context is not None and isinstance(parameters := getattr(text, "rope_parameters", None), Mapping):
            text.rope_parameters = for_context(parameters, context)
        return text
    except Exception as error:  # which one depends on the key whose value is none that transformers expects
        why = _in_words(error)
        raise ModelError(
            f"{path / 'config.json'}: transformers cannot read it: {why}",
            "compare it with the model's original, or update transformers for a newer architecture",
        ) from error


_KINDS: Final = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "list": "list",
    "dict": "table",
    "NoneType": "null",
}


def _in_words(error: Exception) -> str:
    """Why transformers cannot read a configuration: of a value of the wrong kind its key, and what it should be."""
    said = " ".join(str(error).split())
    if unknown := re.search("model type `(.*)` but Transformers does not recognize", said):
        return f"it does not know the model type {unknown[1]}"
    wrong = re.search(r"Field '([^']+)'.*? (?:expected |match any type in )(.+?)(?:, got |\. Errors)", said)
    named = re.sub(r"\[[^]]*\]", "", wrong[2]) if wrong else ""  # list[str] is a list
    if wrong and (kinds := [word for name, word in _KINDS.items() if re.search(rf"\b{name}\b", named)]):
        entry = ", or has an entry of the wrong kind" if "[" in wrong[2] else ""
        return f"{wrong[1]} is no {' or '.join(kinds)}{entry}"
    if item := re.search(r"Invalid .* in \w+ '(\w+)'", said):
        return f"{item[1]} has an entry of the wrong kind"
    if isinstance(error, KeyError):
        return f"it leaves out {error.args[0]}"
    by_author = re.search(r"^(?:Class v|V)alidation error .*? \w+Error: (.*)", said)  # of huggingface_hub
    if by_author or isinstance(error, ValueError | NotImplementedError):
        return (by_author[1] if by_author else said)[:300]
    return "a value is not of the expected form"


def _sizes(config: Any, path: Path) -> tuple[int | None, int]:
    """How many tokens the model reads, and of how many kinds."""
    try:
        return longest_context(config), int(config.vocab_size)
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"{path / 'config.json'}: it does not state what a model reads: {first_line(error)}"
        raise ModelError(reason, "compare it with the model's original") from error


def check_weights(folder: Path) -> None:
    """Raise ModelError, naming the file, if a shard is missing, truncated or malformed, or lacks an indexed tensor."""
    if (folder / INDEX).is_file():
        _check_index(folder)
        return
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"{folder}: no *.safetensors weights", "other weight formats are not read; convert the model")
    for shard in shards:
        _tensors(shard)


def _check_index(folder: Path) -> None:
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX}: no weight_map", _HINT)
    for shard in sorted(set(weight_map.values())):
        present = _tensors(folder / shard)
        missing = sorted(name for name, file in weight_map.items() if file == shard and name not in present)
        if missing:
            raise ModelError(f"{folder / shard}: {missing[0]} is missing, which {INDEX} places in it", _HINT)


def _tensors(shard: Path) -> set[str]:
    """Names of the tensors in a shard. ModelError if its header is malformed or its size differs from the header's."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{shard}: not a safetensors file, or truncated ({size} bytes)", _HINT)
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except OSError as error:
        raise ModelError(f"{shard}: cannot be read: {error.strerror or error}", _HINT) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{shard}: malformed safetensors header: {error!r}", _HINT) from error
    if size != 8 + length + end:
        raise ModelError(f"{shard}: {size} bytes, but its header describes {8 + length + end}", _HINT)
    return set(header)
