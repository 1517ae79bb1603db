"""When the parameters of a model may be written, with FSDP2, torch.compile or adapters in it.

Which modules hold a fragment's parameters, whether they must be resharded before a write, and before whose forward an update
must be in; and whether an adapter is merged into its base, so that nothing may be written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from edit.errors import ConfigError
from edit.replica.layout import clean_name

__all__ = ["ParameterModules", "reshard"]

_log = logging.getLogger(__name__)


class ParameterModules:
    """The modules of one model, resharded, as its fragments need them. tensors: by fragment, the parameters (and buffers)."""

    def __init__(self, model: nn.Module, tensors: Sequence[Sequence[Tensor]]) -> None:
        self._root = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._groups = _groups(self._modules)
        owners = _owners(self._modules)
        self._owners = [[name for tensor in fragment for name in owners.get(id(tensor), [])] for fragment in tensors]
        self._trainable = _trainable(model)
        self._frozen: dict[str, nn.Parameter] = {}  # at the last contribution and at each step since
        self._said_frozen = False
        self._adapters = _adapters(self._modules)
        self._sharding = [list(dict.fromkeys(self._sharding_modules(names))) for names in self._owners]

    def before_write(self, fragment_id: int) -> None:
        """Drop gathered copies of the fragment's parameters, which FSDP would otherwise go on using after a write."""
        for module in self._sharding[fragment_id]:
            _finish_unshard(module)
            module.reshard()

    def update_points(self) -> dict[nn.Module, tuple[int, ...]]:
        """Return before whose forward each fragment's update must be in, by module; the first one to run counts.

        A module that FSDP shards as a unit; for parameters that no FSDP unit holds, each module that owns one of them, and the
        lowest module above them all. Inside a compiled module no hook runs: then the module around it.
        """
        update_points: dict[nn.Module, dict[int, None]] = {}
        for i, names in enumerate(self._owners):
            for module in self._modules_of(names):
                update_points.setdefault(module, {})[i] = None
        return {module: tuple(fragments) for module, fragments in update_points.items()}

    def refuse_prefetch(self) -> None:
        """Raise ConfigError when a module gathers the parameters of later ones before their updates are in."""
        for name, module in self._modules.items():
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._states_to_forward_prefetch:
                raise ConfigError(
                    f'mode = "forward": module {name or "(root)"} prefetches the parameters of later modules, which are not '
                    "updated yet; leave out set_modules_to_forward_prefetch, or choose another mode"
                )

    def merged(self) -> str | None:
        """Return the name of an adapter layer that is merged into its base now, if there is one.

        Its own parameters must not be written then: unmerging would take off the base something else than was added to it.
        """
        return next((name or "(root)" for name, module in self._adapters.items() if module.merged), None)

    def refuse_unfrozen(self) -> None:
        """Raise ConfigError when a parameter is trainable that was frozen, or not there, before."""
        if unfrozen := [name for name in _trainable(self._root) if name not in self._trainable]:
            raise ConfigError(
                f"trainable, but frozen when the EditWorker was entered, so not exchanged: {_first(unfrozen)}; "
                "unfreeze parameters before entering, or leave and enter again"
            )

    def before_step(self) -> None:
        """An optimizer of the model is about to step: what it may train is not frozen, only what it leaves alone."""
        self._frozen = {name: each for name, each in self._frozen.items() if not each.requires_grad and each.grad is None}

    def warn_frozen(self) -> None:
        """At each contribution: say once which parameters have been frozen since the one before; they are still exchanged.

        Not of those that are frozen now and then, as the discriminator of a GAN is while the generator is trained.
        """
        if self._said_frozen:
            return
        before, now = self._frozen, _parameters(self._root, trainable=False)
        self._frozen = {name: each for name, each in now.items() if name in self._trainable}
        if frozen := [name for name in before if name in self._frozen]:
            self._said_frozen, self._frozen = True, {}
            _log.warning(
                "frozen since the EditWorker was entered, but exchanged all the same: %s; merges and the outer momentum go on "
                "moving them: to keep them still, freeze them at all peers before entering a new run",
                _first(frozen),
            )

    def refuse_replaced(self, named: Mapping[str, Tensor]) -> None:
        """Raise ConfigError when the model has another object, or none, under the name of one of these tensors."""
        if not self._replaced(named):
            return
        reshard(self._root)  # a gathered copy has the name of its shard
        if replaced := self._replaced(named):
            raise ConfigError(
                f"replaced or removed since the EditWorker was entered, so no longer exchanged: {_first(replaced)}; change the "
                "model before entering, and load a state_dict without assign=True"
            )

    def _replaced(self, named: Mapping[str, Tensor]) -> list[str]:
        found = {
            clean_name(f"{prefix}.{name}" if prefix else name): tensor
            for prefix, module in self._root.named_modules(remove_duplicate=False)
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        }
        # Of a model with a `named_parameters` of its own; not every such takes `remove_duplicate`.
        found |= {clean_name(name): parameter for name, parameter in self._root.named_parameters()}
        return [name for name, tensor in named.items() if found.get(name) is not tensor]

    def _modules_of(self, names: Sequence[str]) -> Iterator[nn.Module]:
        units: list[str] = []
        free = []
        for name in names:
            if (unit := self._unit(name)) is None:
                free.append(name)
            else:
                units += self._groups[id(unit._get_fsdp_state())]
        for name in dict.fromkeys([*units, *free, *([_common_prefix(free)] if free else [])]):
            if (module := self._eager(name)) is not None:
                yield module

    def _sharding_modules(self, names: Sequence[str]) -> Iterator[FSDPModule]:
        for name in names:
            if (unit := self._unit(name)) is not None:
                yield unit

    def _unit(self, name: str) -> FSDPModule | None:
        """Return the FSDP unit to which a module's own parameters belong."""
        return next((module for module in map(self._modules.get, _upwards(name)) if isinstance(module, FSDPModule)), None)

    def _eager(self, name: str) -> nn.Module | None:
        """Return the module of that name, or the nearest above it whose hooks run although a part of the model is compiled."""
        path = list(_upwards(name))
        compiled = [i for i, above in enumerate(path) if _compiled(self._modules[above])]
        start = compiled[-1] if compiled else 0
        if compiled and not hasattr(self._modules[path[start]], "_orig_mod"):
            start += 1  # compiled in place: its own hooks are compiled with it
        return next((self._modules[above] for above in path[start:] if _runs(self._modules[above])), None)


def reshard(model: nn.Module) -> None:
    """Make the model's parameters the shards again wherever FSDP has left them gathered, as after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _finish_unshard(module: FSDPModule) -> None:
    """Wait for an `unshard(async_op=True)`, if there is one: a `reshard` before its end does nothing, and the next forward uses
    what it gathered."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 has one
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            group.wait_for_unshard()


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _parameters(model: nn.Module, *, trainable: bool) -> dict[str, nn.Parameter]:
    return {clean_name(name): each for name, each in model.named_parameters() if each.requires_grad == trainable}


def _trainable(model: nn.Module) -> dict[str, None]:
    return dict.fromkeys(_parameters(model, trainable=True))


def _adapters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers, by name, that can add what they train to what they have frozen, and say whether they have: by an
    attribute `merged`, as those of PEFT, loralib and torchtune do."""
    return {
        clean_name(name): module
        for name, module in modules.items()
        if isinstance(getattr(module, "merged", None), bool)
        and {parameter.requires_grad for parameter in module.parameters()} == {True, False}
    }


def _groups(modules: dict[str, nn.Module]) -> dict[int, list[str]]:
    """Return the names of each FSDP unit's modules, by its state: of one, unless `fully_shard` was given a list."""
    groups: dict[int, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, FSDPModule):
            groups.setdefault(id(module._get_fsdp_state()), []).append(name)
    return groups


def _owners(modules: dict[str, nn.Module]) -> dict[int, list[str]]:
    """Return the names of the modules that use a tensor under a name of their own; several for a tied one."""
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                owners.setdefault(id(tensor), []).append(name)
    return owners


def _upwards(name: str) -> Iterator[str]:
    """Yield the name, then its parents' names up to the root's, which is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _common_prefix(names: Sequence[str]) -> str:
    first, *others = [name.split(".") if name else [] for name in names]
    length = len(first)
    for other in others:
        length = next((i for i in range(min(length, len(other))) if first[i] != other[i]), min(length, len(other)))
    return ".".join(first[:length])


def _compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward; a ModuleList has none."""
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward
