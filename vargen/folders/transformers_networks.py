"""Opening a network of transformers in a folder: class, configuration and weights are ours to choose and to check.

The class comes from a table of ours, of the configuration only listed keys with plain values pass on, and transformers reads a
private folder that holds nothing but these values and the weight files whose headers were checked. After loading, every stored
tensor is compared with the parameter of its name, because the library fills what is missing and drops what is tied.
"""

from __future__ import annotations

import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vargen.compat import installed_version
from vargen.folders.json_files import expect, fill_folder, read_config, whole
from vargen.folders.networks import SkipInit
from vargen.folders.transformers_configs import pick_config, pick_generation, pick_quantization
from vargen.values import one_line
from vargen.weight_files import (
    WeightHeader,
    find_weight_files,
    list_shapes,
    read_headers,
    rename,
    validate_dtypes,
    validate_layer_counts,
    validate_shapes,
)

# Stored tensors that networks do not have as parameters: tables that they compute, and of quantized weights their scales.
_COMPUTED = r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias)$"
_SCALES = r"\.(SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$"
_RELEASE = tuple(int(part) for part in (installed_version("transformers") or "0.0").split(".")[:2])
_DTYPE = "dtype" if _RELEASE >= (4, 56) else "torch_dtype"  # argument name of transformers
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # of safetensors and torch
_COUNT = whole(0, 2**20)
_PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NetworkKind:
    """What a folder may hold.

    Attributes:
        class_name: name of a class of transformers.
        model_type: of its configuration.
        parts: classes of the nested configurations by key.
        renamed: patterns in names of stored tensors and their replacements, for folders of earlier releases.
        ignored: patterns of the names of stored tensors that the class has no use for.
        layers: by key of a number of layers, what stands before the number of a layer in names of stored tensors.
        own: returns the class where it is ours, over a configuration of transformers with numbers `more`.
        flatten: returns the configuration of the network from that of a file which describes other networks, too.
        defaults: settings that a folder may leave out, where those of the class are others.
    """

    class_name: str
    model_type: str
    parts: Mapping[str, str] | None = None
    renamed: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    own: Callable[[], Any] | None = None
    more: Sequence[str] = ()
    flatten: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


class StoredNetwork:
    """A network in a folder, described by its configuration and the headers of its weight files; no weights were read.

    Args:
        folder: its folder. kind: what it must hold. variant: of the names of its weight files.

    Attributes:
        network_class, config: class and configuration of transformers.
        dtype: the narrowest that holds all stored weights.
        network: without memory, in evaluation mode.
        is_quantized: whether the folder stores quantized weights.
    """

    def __init__(self, folder: Path, kind: NetworkKind, variant: str | None = None):
        import transformers

        self.folder, self.kind = folder, kind
        self.network_class: Any = getattr(transformers, kind.class_name) if kind.own is None else kind.own()
        file = folder / "config.json"
        values = read_config(file)
        given = values.get("model_type")
        expect(given == kind.model_type, "model_type", given, file, repr(kind.model_type))
        values = values if kind.flatten is None else kind.flatten(values, file)
        if (adapter := folder / "adapter_config.json").exists():  # transformers would fetch the model that it names
            raise ValueError(f"{adapter} makes this the adapter of another model: merge it into that model's weights")
        files = find_weight_files(folder, "model", variant)
        header, self.files = read_headers(files)  # files by name of a tensor as stored
        for each in files:
            if each.name != "model.safetensors" and (folder / "model.safetensors").is_file():
                raise ValueError(f"{folder} holds model.safetensors beside the index of other files; remove one of them")
        self.names: dict[str, str] = {}  # stored names by current ones
        for name in self.files:
            if (other := self.names.setdefault(rename(name, kind.renamed), name)) != name:
                raise ValueError(f"{folder} stores {name} twice, also as {other}; download the folder again")
        validate_layer_counts(header, values, kind.layers, file)
        self.is_quantized = bool(values.get("quantization_config"))
        self._ignored = re.compile("|".join([_COMPUTED, *kind.ignored, *[_SCALES] * self.is_quantized]))
        picked = pick_config(self.network_class.config_class, values, kind.parts or {}, file, len(self.files))
        picked = {**kind.defaults, **picked}
        for name in kind.more:
            expect(_COUNT.fits(values.get(name)), name, values.get(name), file, _COUNT.allowed)
            picked[name] = values[name]
        try:
            self.config = self.network_class.config_class(**picked)
            with torch.device("meta"), SkipInit():
                self.network = self.network_class(self.config).eval()
            self.network.tie_weights()
        except ImportError as error:  # transformers 4.53 imports every configuration, and that of gemma3n needs a newer timm
            installed = f"transformers {transformers.__version__} and other packages"
            raise ValueError(f"the installed {installed} cannot construct a {kind.class_name}: {one_line(error)}") from error
        except Exception as error:  # classes of transformers validate little, and fail in many ways
            raise ValueError(f"{file} does not describe a {kind.class_name}: {one_line(error)}") from error
        if self.is_quantized:
            self.config.quantization_config = pick_quantization(values["quantization_config"], file)
        self.generation = pick_generation(folder) if self.network.can_generate() else {}
        self._expected = self.network.state_dict(keep_vars=True)
        self._validate_header(header)
        floats = [getattr(torch, _DTYPES[header[name].dtype]) for name in self.files if header[name].dtype in _DTYPES]
        self.dtype = reduce(torch.promote_types, floats) if floats else torch.float32

    def _tied_names(self, name: str) -> list[str]:
        """Names of the same parameter, the given one included."""
        return [other for other, value in self._expected.items() if value is self._expected[name]]

    def _validate_header(self, header: WeightHeader) -> None:
        found = {name: header[stored] for name, stored in self.names.items()}
        tied = {name for name in self._expected.keys() - found.keys() if found.keys() & {*self._tied_names(name)}}
        expected = list_shapes({name: value for name, value in self._expected.items() if name not in tied})
        shapes = list_shapes(found)
        if self.is_quantized:  # packed weights have other shapes
            shapes = {name: expected.get(name, shape) for name, shape in shapes.items()}
        used = {name: shape for name, shape in shapes.items() if name in self._expected or not self._ignored.search(name)}
        validate_shapes(used, expected, str(self.folder))
        if not self.is_quantized:
            floats = {name: found[name] for name in found if name in expected and self._expected[name].is_floating_point()}
            validate_dtypes(floats, str(self.folder))

    # -- loading ----------------------------------------------------------------------------------------------------------

    def load(self, dtype: torch.dtype | None = None, *, without: str | None = None, **options: Any) -> Any:
        """Load the network, in evaluation mode, and compare its parameters with the stored tensors.

        Args:
            dtype: of its parameters; None selects the narrowest that holds all stored weights.
            without: name of its language model's list of layers, which then is empty; see `read_layer`.
            options: of `from_pretrained` of transformers that place or quantize.
        """
        config = deepcopy(self.config)
        if without is not None:
            text = config.get_text_config()
            text.num_hidden_layers = 0
            if getattr(text, "layer_types", None):
                text.layer_types = []
        with ExitStack() as stack:
            stack.enter_context(_without_report(self.network_class, without))
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vargen-")))
            fill_folder(place, self._files_to_read(place, config, without))
            if self.kind.own is not None:  # transformers knows no earlier names of its tensors
                options["key_mapping"] = dict(self.kind.renamed)
            options = {_DTYPE: dtype or self.dtype, "use_safetensors": True, "local_files_only": True, **options}
            try:
                network = self.network_class.from_pretrained(place, config=config, trust_remote_code=False, **options)
            except (ImportError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # as above
                raise ValueError(f"{self.folder} cannot be loaded: {one_line(error)}") from error
            self._verify(network.eval())
            if any(value.is_meta for value in network.state_dict().values()):  # on disk: read in each pass
                weakref.finalize(network, stack.pop_all().close)
        if without is not None:
            network.config.get_text_config().num_hidden_layers = self.config.get_text_config().num_hidden_layers
        return network

    def read_layer(self, layers: str, number: int) -> dict[str, Tensor]:
        """Return the stored tensors of a layer, by their names in it; `layers` is the name of the list of layers."""
        found, prefix = {}, f"{layers}.{number}."
        for name, stored in self.names.items():
            if name.startswith(prefix) and not self._ignored.search(name):
                with safe_open(str(self.files[stored]), "pt") as opened:
                    found[name.removeprefix(prefix)] = opened.get_tensor(stored)
        return found

    def _files_to_read(self, place: Path, config: Any, without: str | None) -> dict[str, Path | Mapping[str, Any]]:
        """Return links to the weight files and their index; writes a copy of tied embeddings stored under their other name."""
        paths = sorted(set(self.files.values()))
        shard = {path: f"model-{i:05}-of-{len(paths):05}.safetensors" for i, path in enumerate(paths, 1)}
        index = {stored: shard[self.files[stored]] for name, stored in self.names.items() if not self._ignored.search(name)}
        if without is not None:
            layers = {stored for name, stored in self.names.items() if name.startswith(f"{without}.")}
            index = {stored: file for stored, file in index.items() if stored not in layers}
        absent = [name for name in self._expected if name not in self.names]  # their tied names are stored
        # From the input embeddings, by their first name, the library fills those that are tied to them.
        embeddings = self.network.get_input_embeddings().weight if absent else None
        source = next((name for name, value in self._expected.items() if value is embeddings), "")
        if source in absent:
            stored = next(self.names[name] for name in self._tied_names(source) if name in self.names)
            with safe_open(str(self.files[stored]), "pt") as opened:
                save_file({source: opened.get_tensor(stored)}, place / "tied.safetensors")
            index[source] = "tied.safetensors"
        files: dict[str, Path | Mapping[str, Any]] = {name: path for path, name in shard.items()}
        files |= {"config.json": config.to_dict(), "generation_config.json": self.generation}
        return {**files, "model.safetensors.index.json": {"metadata": {}, "weight_map": index}}

    def _verify(self, network: Any) -> None:
        """Raise ValueError unless every stored tensor is the parameter of its name, after the cast, and none is missing."""
        loaded = network.state_dict(keep_vars=True)
        offloaded = {name for name, value in loaded.items() if value.is_meta}
        if offloaded and not any(hasattr(module, "_hf_hook") for module in network.modules()):
            raise ValueError(f"{self.folder} stores no value for {min(offloaded)}")
        for path in set(self.files.values()):
            with safe_open(str(path), "pt") as opened:
                for name, stored in self.names.items():
                    if self.files[stored] == path and name in loaded and name not in offloaded:
                        self._compare(name, loaded[name], opened.get_tensor(stored))
        present = {value.data_ptr() for name, value in loaded.items() if name in self.names}
        for name in set() if self.is_quantized else self._expected.keys() & loaded.keys() - self.names.keys() - offloaded:
            if loaded[name].data_ptr() not in present:
                raise ValueError(f"{self.folder} stores no value for {name}")

    def _compare(self, name: str, value: Tensor, stored: Tensor) -> None:
        if value.dtype not in _PLAIN_DTYPES or not stored.is_floating_point() or type(value.data) is not Tensor:
            return  # quantized, or not a weight
        stored = stored.to(value.device, value.dtype)
        if value.shape != stored.shape or not torch.allclose(value.detach(), stored, rtol=0, atol=0, equal_nan=True):
            tied = "; tie_word_embeddings in config.json replaces it" if name.endswith("head.weight") else ""
            raise ValueError(f"{self.folder} stores a {name} that the loaded network does not have{tied}")


@contextmanager
def _without_report(network_class: Any, without: str | None) -> Iterator[None]:
    """Let the library load a network without some of its stored tensors, by the name that theirs begin with, silently."""
    before = network_class._keys_to_ignore_on_load_unexpected
    if without is not None:
        network_class._keys_to_ignore_on_load_unexpected = [*(before or ()), rf"^{re.escape(without)}\."]
    try:
        yield
    finally:
        network_class._keys_to_ignore_on_load_unexpected = before
