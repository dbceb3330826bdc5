"""Models and tokenizers from the hub or a local folder, checked for what this package can serve exactly.

What transformers tells developers is kept from users; how much is loaded, and that a device is full, is shown to them.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from specdec.cache.recurrent.binding import RecurrentLayer
from specdec.cache.recurrent.opaque import OpaqueState, find_opaque_state
from specdec.checkpoint.configuration import eos_token_ids, generation_defaults, max_model_len
from specdec.checkpoint.weight_files import check_weight_files, local_folder, tensor_bytes
from specdec.core.errors import ModelLoadError, SpecdecError
from specdec.core.params import GenerationDefaults
from specdec.core.types import Engine, Progress, Quantization
from specdec.kernels.attention import ATTENTION_NAME, register_attention
from specdec.models.hidden import HiddenStates
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.models.probe import AttentionLayer, find_layers
from specdec.models.quantization import is_quantized, pack_int8, quantizing, stored_bytes

EVERY_S = 2.0
BAR = "Loading weights"
"""What transformers calls its bar over the weights."""


def weights_bytes(path: str, revision: str | None = None) -> dict[str, int]:
    """Bytes of each tensor in a model's safetensors files, by its name there; only their headers are read.

    Args:
        path: Local folder, or hub id whose files are in the hub's cache; nothing is downloaded.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelLoadError: A file is damaged.
    """
    folder = local_folder(path, revision)
    files = [] if folder is None else folder.glob("*.safetensors")
    return {name: size for file in files for name, size in tensor_bytes(file).items()}


def watched(
    weights: Iterable[tuple[str, Any]],
    sizes: dict[str, int],
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Any]]:
    """The weights as they are loaded; every two seconds a report says how far that is, as in ``3.1 of 7.5 GB``.

    Args:
        weights: Each with its name in the model; the next is asked for when the one before is loaded.
        sizes: Bytes by name. What has another name in the model, or is put together of several tensors, counts an equal
            share of the rest.
        report: Is given a line.
        clock: Monotonic time in seconds.
    """
    items = list(weights)
    unknown = sum(name not in sizes for name, _ in items)
    known_bytes = sum(sizes.get(name, 0) for name, _ in items)
    total = sum(sizes.values()) if unknown else known_bytes
    share = (total - known_bytes) / unknown if unknown else 0.0
    done, reported_s = 0.0, clock()
    for item in items:
        yield item
        done += sizes.get(item[0], share)
        if clock() >= reported_s + EVERY_S:
            reported_s = clock()
            report(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")


_ADVICE = " Of the allocated memory"
"""Where torch's message turns from what was asked for and what there is to the settings of its allocator."""
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for CPUs says, in a plain RuntimeError."""


@contextmanager
def allocation(failure: type[SpecdecError], what: str) -> Iterator[None]:
    """Raise ``failure`` where memory is asked for that a device does not have.

    Args:
        failure: Class of the error.
        what: Does not fit, and where: the message begins with it, and goes on with what was asked for.

    Raises:
        SpecdecError: Of the class ``failure``.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _NO_MEMORY not in str(error):
            raise
        asked_for = " ".join(str(error).split()).partition(_ADVICE)[0]
        raise failure(f"{what}: {asked_for}") from error


Bar = Callable[[Any, Any, Any], Any]
"""What stands in for transformers' progress bars; see its ``set_tqdm_hook``."""

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def quiet(bar: Bar | None = None) -> Iterator[None]:
    """Keep transformers' progress bars and its warnings to developers from the user, for a while.

    The bars of downloads are huggingface_hub's, and stay: ``disable_progress_bar`` would take them too. One thread at a
    time is in here: what is set is the process's, and so is torch's default dtype, which transformers sets while it
    makes a model. A thread that came second and left last would put back what the first had set.

    Args:
        bar: In the place of transformers' bars.
    """
    with _ONE_AT_A_TIME:
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        hook = transformers_logging.set_tqdm_hook(bar or no_bar)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            transformers_logging.set_tqdm_hook(hook)


def no_bar(_: Any, args: Any, kwargs: Any) -> Any:
    """No bar; see :data:`Bar`."""
    return transformers_logging.EmptyTqdm(*args, **kwargs)


DTypeName = Literal["auto", "float32", "bfloat16", "float16"]

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from, and how it is to be held.

    Attributes:
        path: Hub id or local folder.
        revision: Branch, tag or commit on the hub; None is the default branch.
        token: Hub token for gated models; None uses the one stored by ``hf auth login``, if any.
        dtype: ``auto`` is float32 on a CPU, and the checkpoint's own dtype elsewhere.
        device: ``auto`` is the first GPU, or the CPU where there is none; else a torch device such as ``cuda:1``.
        device_map: How accelerate spreads the layers over devices (``auto``, or module names to devices); None puts
            all on ``device``.
        quantization: Weights of linear layers in fewer bits: see :func:`specdec.models.quantization.quantizing`.
        adapters: Room for LoRA adapters; None serves none.
        engine: ``openvino`` runs its steps on CPUs; ``transformers`` runs transformers' layers on any device.
    """

    path: str
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    dtype: DTypeName = "auto"
    device: str = "auto"
    device_map: str | dict[str, int | str] | None = None
    quantization: Quantization = "none"
    adapters: LoRAConfig | None = None
    engine: Engine = "transformers"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for a :class:`specdec.executor.runner.ModelRunner`.

    Attributes:
        model: In eval mode, with the paged attention set.
        config: Its text configuration.
        name: As the user gave it.
        dtype: Of its parameters.
        device: Where its inputs go.
        vocab_size: Width of its logits, padding included.
        eos_token_ids: End-of-sequence ids; several are allowed, and none.
        max_model_len: Longest sequence, in tokens.
        num_parameters: Each shared parameter once.
        weights_bytes: Bytes of parameters and buffers.
        attention_layers: What it caches per position.
        recurrent_layers: What it keeps per sequence.
        opaque_state: A state that can only be copied as a whole: the model keeps transformers' own attention, for a
            :class:`specdec.executor.snapshot_runner.SnapshotRunner`.
        generation_defaults: What its ``generation_config.json`` sets for requests that do not say.
        adapters: Slots for LoRA adapters; None where it has none.
        hidden: What is noted of its passes for heads that draft; None where there are none.
    """

    model: PreTrainedModel
    config: PretrainedConfig
    name: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_parameters: int
    weights_bytes: int
    attention_layers: tuple[AttentionLayer, ...]
    generation_defaults: GenerationDefaults
    recurrent_layers: tuple[RecurrentLayer, ...] = ()
    opaque_state: OpaqueState | None = None
    adapters: AdapterSlots | None = None
    hidden: HiddenStates | None = None

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the slots for adapters."""
        return 0 if self.adapters is None else self.adapters.num_bytes


def load_model(source: ModelSource, progress: Progress | None = None) -> LoadedModel:
    """Load a causal language model from safetensors, without remote code.

    Args:
        source: Where from, and how to hold it.
        progress: Called with a line for each stage, and every two seconds with how many bytes of weights are loaded.

    Raises:
        ModelLoadError: the model is missing, is not a causal language model, has no safetensors or damaged ones, needs
            code of its own, is larger than its device's memory, or is of a kind that cannot be served exactly.
    """
    report = progress or _say_nothing
    if source.engine == "openvino":  # which quantizes by itself
        source = replace(source, quantization="none", device="cpu" if source.device == "auto" else source.device)
    model = load_weights(source, report)
    loaded = prepare_model(model, source.path)
    if source.quantization != "none" and not any(map(is_quantized, loaded.model.modules())):
        raise ModelLoadError(f"no layer of {source.path} can be quantized by {source.quantization}")
    if source.quantization == "int8":
        pack_int8(loaded.model)
    if source.adapters is not None:
        loaded = replace(loaded, adapters=_adapter_slots(loaded, source.adapters))
    report(
        f"loaded {source.path}: {loaded.num_parameters / 1e6:,.1f} M parameters, "
        f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}"
    )
    return loaded


def load_weights(source: ModelSource, progress: Progress) -> PreTrainedModel:
    """Load a causal language model as transformers runs it, without the paged attention.

    Raises:
        ModelLoadError: As :func:`load_model`.
    """
    progress(f"reading the configuration of {source.path}")
    config = load_config(source)
    device = choose_device(source.device)
    dtype = _dtype(source.dtype, device)
    place = "" if Path(source.path).expanduser().is_dir() else ", downloaded first where the cache lacks it"
    progress(f"loading {source.path}{place}")
    with allocation(ModelLoadError, f"the weights of {source.path} do not fit into the memory of {device}"):
        return _load_weights(source, config, device, dtype, lambda line: progress(f"loading {source.path}: {line}"))


def _adapter_slots(loaded: LoadedModel, room: LoRAConfig) -> AdapterSlots:
    if loaded.opaque_state is not None:
        raise ModelLoadError(f"{loaded.name} takes no adapters: it keeps a state that can only be copied")
    with allocation(ModelLoadError, f"room for adapters of {loaded.name} does not fit into the memory there is"):
        return AdapterSlots(loaded.model, room)


def load_config(source: ModelSource) -> PretrainedConfig:
    """Read a model's configuration, and refuse what cannot be served, before any weights are read.

    Raises:
        ModelLoadError: as :func:`load_model`.
    """
    _check_folder(source.path)
    config = _from_pretrained(AutoConfig, source)
    _check_layers(config, auto_class(config, source.path)._model_mapping[type(config)], source.path)
    return config


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, without remote code.

    Raises:
        ModelLoadError: there is none, or it needs code of its own.
    """
    _check_folder(source.path, needs_weights=False)
    return _from_pretrained(AutoTokenizer, source)


def prepare_model(model: PreTrainedModel, name: str) -> LoadedModel:
    """Set the paged attention in a model that is in memory, and gather what the engine needs to know of it.

    Args:
        model: A causal language model of transformers; it is put into eval mode and changed in place.
        name: For messages.

    Raises:
        ModelLoadError: it is of a kind that cannot be served exactly.
    """
    _check_layers(model.config, type(model), name)
    model.eval()
    register_attention()
    text = model.config.get_text_config(decoder=True)
    longest = max_model_len(text, name)
    with quiet():
        attention_layers, recurrent_layers, opaque_state = _find_layers(model, longest)
    device = model.get_input_embeddings().weight.device
    head = model.get_output_embeddings()
    return LoadedModel(
        model=model,
        config=text,
        name=name,
        dtype=model.dtype,
        device=torch.device("cpu") if device.type == "meta" else device,
        vocab_size=text.vocab_size if head is None else head.weight.shape[0],
        eos_token_ids=eos_token_ids(model.generation_config, text),
        max_model_len=longest,
        num_parameters=model.num_parameters(),
        weights_bytes=stored_bytes(model),
        attention_layers=attention_layers,
        generation_defaults=generation_defaults(model.generation_config, name),
        recurrent_layers=recurrent_layers,
        opaque_state=opaque_state,
    )


def _find_layers(
    model: PreTrainedModel, longest: int
) -> tuple[tuple[AttentionLayer, ...], tuple[RecurrentLayer, ...], OpaqueState | None]:
    """The layers; or, where some are recurrent in a way that is not known here, the state that the model gives away."""
    before = model.config._attn_implementation
    try:
        attention_layers, recurrent_layers = find_layers(model, longest)
    except ModelLoadError:
        if not is_recurrent(model.config, type(model)):
            raise
        if model._can_set_attn_implementation():
            model.set_attn_implementation(before)
        return (), (), find_opaque_state(model)
    if attention_layers:
        model.set_attn_implementation(ATTENTION_NAME)
    return attention_layers, recurrent_layers, None


def is_recurrent(config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None) -> bool:
    """Whether some layers keep another state than keys and values, by what the model says of itself."""
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(getattr(model_class, "_is_stateful", False) or set(layer_types) & _RECURRENT_KINDS)


def auto_class(config: PretrainedConfig, name: str) -> Any:
    """Transformers' loader for a decoder; of a model that also reads images, its text part is what is used."""
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto_class._model_mapping and not config.is_encoder_decoder:
            return auto_class
    raise ModelLoadError(f"{name} is not a causal language model ({config.model_type})")


def _check_layers(config: PretrainedConfig, model_class: type[PreTrainedModel], name: str) -> None:
    """Refuse layers that keep a state of which nothing is known here, by what the model says of itself."""
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    kinds = set(layer_types) - _ATTENTION_KINDS - _RECURRENT_KINDS
    if kinds and not is_recurrent(config, model_class):
        raise ModelLoadError(f"{name} has layers of the kind {min(kinds)!r}, which are not supported")


def _say_nothing(_: str) -> None:
    pass


def _check_folder(path: str, needs_weights: bool = True) -> None:
    """Errors for local folders that transformers would report as a failed download."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise ModelLoadError(f"there is no folder {path}")
        return
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json")
    if needs_weights:
        check_weight_files(folder)


def _from_pretrained(loader: Any, source: ModelSource, bar: Bar | None = None, **options: Any) -> Any:
    """Call ``loader.from_pretrained``, with its failures as one line each, and maybe a bar of our own."""
    path = str(Path(source.path).expanduser()) if Path(source.path).expanduser().is_dir() else source.path
    try:
        with quiet(bar):
            return loader.from_pretrained(
                path, revision=source.revision, token=source.token, trust_remote_code=False, **options
            )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError) as error:
        folder = local_folder(source.path, source.revision)
        if isinstance(error, SafetensorError) and folder is not None:
            check_weight_files(folder)  # names the file, of one from the hub too
        reason = str(error).strip()
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which is not run"
        elif isinstance(error, OSError) and "safetensors" in reason and "-of-" not in reason:
            reason = "it has no safetensors; other formats are not read"
        where = source.path if source.revision is None else f"{source.path} at revision {source.revision}"
        raise ModelLoadError(f"cannot load {where}: {reason}") from error


def _load_weights(
    source: ModelSource,
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype | str,
    report: Progress,
) -> PreTrainedModel:
    def bar(_: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("desc") != BAR:
            return no_bar(_, args, kwargs)
        return watched(args[0], weights_bytes(source.path, source.revision), report)

    device_map = source.device_map
    if device_map is None and device.type != "cpu":
        device_map = {"": str(device)}
    loader = auto_class(config, source.path)
    model, info = _from_pretrained(
        loader,
        source,
        bar,
        config=config,
        dtype=dtype,
        device_map=device_map,
        use_safetensors=True,
        output_loading_info=True,
        **quantizing(source.quantization, config, loader, source.path, device, dtype),
    )
    # transformers fills what a checkpoint lacks with random numbers, and only warns.
    lacking = sorted(info["missing_keys"]) + sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if lacking:
        raise ModelLoadError(
            f"the weights of {source.path} are not those of a {type(model).__name__}: "
            f"{len(lacking)} are missing or of another shape, the first being {lacking[0]}"
        )
    return model


def choose_device(name: str) -> torch.device:
    """Choose the device that a source's ``device`` names; raises ModelLoadError if it is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device {name} is not there: {torch.cuda.device_count()} GPUs are visible")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
