"""Device-property and kernel-cache objects of the API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from graphdnn import device as devices
from graphdnn.device import DeviceProps
from graphdnn.errors import SerializationError, explain
from graphdnn.frontend.tensor import as_integer
from graphdnn.plans.cache import KernelStore, pack, unpack

if TYPE_CHECKING:
    from graphdnn.codegen.parametric import Forms

CACHE_FORMAT = "graphdnn kernel cache 1"


class DeviceProperties:
    """Facts of one device, for building plans where that device is not present. ``props`` are the facts."""

    def __init__(self, props: DeviceProps) -> None:
        """Wrap ``props``."""
        self.props = props

    def serialize(self) -> str:
        """JSON text that ``create_device_properties`` takes."""
        return self.props.to_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceProperties) and self.props == other.props

    def __hash__(self) -> int:
        return hash(self.props)

    def __repr__(self) -> str:
        return f"<graphdnn device properties: {self.props.name} ({self.props.text})>"


def create_device_properties(source: Any) -> DeviceProperties:
    """Properties of the CUDA device with an ordinal (``create_device_properties(0)``), of a JSON text of ``serialize()``, or of a described device
    ("sm_90", "cpu"). ExecutionError without a driver, SerializationError for a damaged text."""
    if isinstance(source, str):
        return DeviceProperties(DeviceProps.from_json(source) if source.lstrip()[:1] in ("", "{", "[") else devices.parse(source))
    return DeviceProperties(devices.cuda(as_integer("device_id", source)))


class KernelCache:
    """Compiled kernels that several graphs share, and that can be carried to another process as text.

    Graphs that differ in their sizes only share kernels too: sizes that were seen to differ are parameters (docs/dynamic_shapes.md). ``store`` is
    what plans look kernels up in, before the caches of the process; ``forms``: what the kernels have in common.
    """

    def __init__(self) -> None:
        """Empty."""
        self.store = KernelStore()
        self.forms: Forms | None = None
        self._loaded = False

    def serialize(self) -> str:
        """The kernels as text. Holds machine code: load it only from where you would load a program."""
        import base64

        kernels = {key: base64.b64encode(pack(key, binary)).decode() for key, binary in self.store.items()}
        whole: dict[str, Any] = {"format": CACHE_FORMAT, "kernels": kernels}
        if self.forms is not None:
            from graphdnn.plans import forms

            whole["forms"] = forms.dump(self.forms)
        return json.dumps(whole, sort_keys=True)

    def shared(self) -> Forms:
        """The forms, which are none before the first graph is built."""
        if self.forms is None:
            from graphdnn.codegen.parametric import Forms

            self.forms = Forms()
        return self.forms

    def deserialize(self, text: str) -> None:
        """Take the kernels of ``serialize()``. SerializationError for a damaged text, and for a second call on the same object."""
        if self._loaded:
            raise SerializationError(
                explain(
                    "this kernel cache has been deserialized before", expected="one deserialize per object", fix="call create_kernel_cache() again"
                )
            )
        import base64

        try:
            stored = json.loads(text)
            if stored["format"] != CACHE_FORMAT:
                raise ValueError(f"format {stored['format']!r}")
            kernels = [(key, unpack(key, base64.b64decode(blob, validate=True))) for key, blob in stored["kernels"].items()]
            found = None
            if "forms" in stored:
                from graphdnn.plans import forms

                found = forms.load(stored["forms"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SerializationError(
                explain(
                    "kernel cache text cannot be read",
                    expected="text of kernel_cache.serialize()",
                    found=f"{type(error).__name__}: {str(error)[:80]}",
                )
            ) from None
        for key, binary in kernels:
            self.store.put(key, binary)
        self.forms = found if found is not None else self.forms
        self._loaded = True

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelCache:
        return self  # it is there to be shared

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.serialize(),)

    def __repr__(self) -> str:
        return f"<graphdnn kernel cache: {len(self.store)} kernels>"


def _restored(text: str) -> KernelCache:
    made = KernelCache()
    made.deserialize(text)
    return made


def create_kernel_cache() -> KernelCache:
    """An empty kernel cache."""
    return KernelCache()
