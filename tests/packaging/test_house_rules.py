"""Rules of the source tree that no linter knows: import order, sizes, files that must agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from sources import CORE, MODULES, ROOT, tree_of

# Modules that may name private parts of torch. They import nothing of the package, so that every room can use them.
PRIVATE_TO_TORCH = tuple(f"automoe.interop.torch_{part}" for part in ("private", "fsdp", "pipelining", "fake"))

# A module imports from its own layer and from those after it. The package itself is a version and two names found when
# asked for.
LAYERS = (
    (
        "automoe.__main__",
        "automoe.cli",
        "automoe.demo",
        "automoe.doctor",
        "automoe.train",
        "automoe.plan",
        "automoe.export",
        "automoe.convert",
    )
    + ("automoe.generate", "automoe.upcycle", "automoe.eval", "automoe.session", "automoe.tinker", "automoe.verl"),
    ("automoe.planner",),
    ("automoe.launch", "automoe.verify"),
    ("recipes",),
    ("automoe.rl",),
    ("automoe.run",),
    ("automoe.classes",),
    ("automoe.checkpoint", "automoe.hf", "automoe.data", "automoe.observe", "automoe.interop"),
    ("automoe.training",),
    ("automoe.parallel", "automoe.optim"),
    ("automoe.model",),
    ("automoe.moe",),
    ("automoe.kernels", "automoe.quantize"),
    ("automoe.comm", "automoe.passes"),
    # the table of parameters, without torch
    ("automoe.model.params", "automoe.model.param_spec"),
    ("automoe.config", "automoe.storage", "automoe.passes.trace", *PRIVATE_TO_TORCH),
    ("automoe.errors",),
)
LEVELS = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING``."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        skipped = node.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in skipped]


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, in functions too; of ``from a import b`` both ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in run_time_nodes(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def all_imports() -> dict[str, set[str]]:
    return {name: imported(path) for name, path in MODULES.items()}


@cache
def own_imports() -> dict[str, set[str]]:
    return {
        name: {other for other in names if other in MODULES and other != "automoe"}
        for name, names in all_imports().items()
    }


def level_of(module: str) -> int:
    parts = module.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    levels = [LEVELS[prefix] for prefix in prefixes if prefix in LEVELS]
    assert levels, f"{module} has no layer in this test"
    return levels[0]


def upward_imports(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} -> {other}"
        for module, others in sorted(imports.items())
        if module != "automoe"
        for other in sorted(others)
        if level_of(other) < level_of(module)
    ]


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which imports all others of its group, directly or through others."""

    def reachable(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            new = imports.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    to = {module: reachable(module) for module in imports}
    groups = {tuple(sorted(other for other in to[module] if module in to[other])) for module in imports}
    return [list(group) for group in sorted(groups) if group]


def test_imports_point_downwards() -> None:
    assert not (upward := upward_imports(own_imports())), "\n".join(upward)


def beyond_the_border(imports: dict[str, set[str]]) -> list[str]:
    """Imports of the reading core that lead out of it. What the core stands on is the configuration, errors, kernels
    with their number formats, and torch, of which the private parts have files of their own. Recipes take all else, such
    as data and checkpoints, from ``automoe.run`` and ``automoe.rl``."""
    ground = ("config", "errors", "kernels", "quantize")
    inside = tuple(f"automoe.{room}" for room in (*CORE, *ground)) + PRIVATE_TO_TORCH + ("recipes",)
    return [
        f"{module} -> {other}"
        for module, others in sorted(imports.items())
        if room_of(module) in CORE
        for other in sorted(others)
        if not other.startswith(inside + ("automoe.run", "automoe.rl") * module.startswith("recipes"))
    ]


def room_of(module: str) -> str:
    return module.removeprefix("automoe.").split(".")[0]


def test_the_reading_core_imports_nothing_of_the_rooms_around_it() -> None:
    assert not (found := beyond_the_border(own_imports())), "\n".join(found)
    wrong = {"automoe.moe.layer": {"automoe.moe.router", "automoe.hf.read"}, "recipes.dpo": {"automoe.data.loader"}}
    assert beyond_the_border(wrong) == ["automoe.moe.layer -> automoe.hf.read", "recipes.dpo -> automoe.data.loader"]


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles(own_imports()) == []


def test_the_trainer_does_not_import_the_planner() -> None:
    entries = ("automoe.planner", "automoe.plan", "automoe.train")
    found = {
        f"{module} -> {other}"
        for module in own_imports()
        for other in own_imports()[module]
        if other.startswith("automoe.planner") and not module.startswith(entries)
    }
    assert found == set()


def test_the_planner_computes_from_the_configuration_and_the_parameters_alone() -> None:
    tables = ("automoe.model.params", "automoe.model.trainable", "automoe.observe.flops")
    fine = ("automoe.planner", "automoe.config", "automoe.errors", *tables)
    entries = ("search_command", "calibrate", "torchtitan_config", "views")
    arithmetic = [m for m in own_imports() if m.startswith("automoe.planner.") and m.split(".")[2] not in entries]
    others = {f"{module} -> {other}" for module in arithmetic for other in own_imports()[module]}
    assert {line for line in others if not line.split(" -> ")[1].startswith(fine)} == set()


def asks_for_the_tier(tree: ast.AST) -> list[str]:
    """Where a file asks if a class of transformers computes a model: it names the constant, or compares with the name."""
    found = []
    for node in ast.walk(tree):
        compared = ast.walk(node) if isinstance(node, ast.Compare | ast.MatchValue) else ()
        spelled = {constant.value for constant in compared if isinstance(constant, ast.Constant)}
        named = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
        if "transformers" in spelled or named in ("TRANSFORMERS", "TransformersModel", "ClassFamily"):
            found.append(ast.unparse(node))
    return found


def test_classes_of_transformers_are_reached_through_their_family_alone() -> None:
    """No other room imports ``automoe.classes`` or asks whether a model is its: see ``automoe/config/tier.py``."""
    others = {name: path for name, path in MODULES.items() if not name.startswith("automoe.classes")}
    found = [
        f"{name} -> {other}" for name in others for other in own_imports()[name] if other.startswith("automoe.classes")
    ]
    found += [f"{name}: {use}" for name, path in others.items() for use in asks_for_the_tier(tree_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "if model.family == TRANSFORMERS: pass",
        "from automoe.somewhere import TRANSFORMERS",
        "native = 'transformers' != config.model.family",
        "if family in ('transformers', 'llama'): pass",
        "isinstance(part, TransformersModel)",
        "match model.family:\n    case 'transformers': pass",
    ],
)
def test_a_question_for_the_tier_is_found(code: str) -> None:
    assert asks_for_the_tier(ast.parse(code))
    assert not asks_for_the_tier(ast.parse("tier_of(model).resizable or logging.getLogger('transformers')"))


def test_nothing_that_ships_imports_tests_or_a_recipe_by_name() -> None:
    foreign = {
        f"{module} -> {other}"
        for module, others in all_imports().items()
        for other in others
        if other.split(".")[0] == "tests" or other.split(".")[0] == "recipes"
    }
    assert foreign == set()


def test_the_rules_on_imports_find_what_breaks_them() -> None:
    assert upward_imports({"automoe.moe.router": {"automoe.model.decoder", "automoe.config.schema"}}) == [
        "automoe.moe.router -> automoe.model.decoder"
    ]
    assert upward_imports({"recipes.pretrain": {"automoe.training.context", "automoe.launch.local"}}) == [
        "recipes.pretrain -> automoe.launch.local"
    ]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    inside = ast.parse("def f():\n    import late\nif TYPE_CHECKING:\n    import never")
    assert [node.names[0].name for node in run_time_nodes(inside) if isinstance(node, ast.Import)] == ["late"]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def names_of_torch(tree: ast.AST) -> dict[str, str]:
    """Names that a file imports from torch, and what each is: ``{"dist": "torch.distributed"}``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def resolved(dotted: str) -> object:
    """The object of a dotted name of torch; None if this torch has none."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(import_module(module), name, None) if module else import_module(dotted)
    except ImportError:
        return None


# Abstract methods with an underscore, which subclasses are there to define.
TO_OVERRIDE = ("torch.distributed.tensor.parallel.ParallelStyle._apply",)


def own_names(trees: list[ast.AST]) -> set[str]:
    """Private names that the package defines or assigns anywhere, so that they are not torch's."""
    names = {
        "_replace",
        "_asdict",
        "_fields",
        "_exit",
        "_current_frames",
        "_lru_cache_wrapper",
    }  # the standard library's
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def private_uses(tree: ast.AST, own: set[str]) -> list[str]:
    """Private parts of torch that a file names, overrides or sets, and public ones that it replaces."""
    torch_names = names_of_torch(tree)
    found = [f"imports {what}" for what in torch_names.values() if any(map(is_private, what.split(".")))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"imports {a.name}" for a in node.names if "torch._" in a.name]
        elif isinstance(node, ast.Attribute):
            root = ast.unparse(node).split(".")[0]
            if is_private(node.attr) and (root in torch_names or node.attr not in own):
                found.append(ast.unparse(node))
            elif isinstance(node.ctx, ast.Store) and root in torch_names:
                dotted = ".".join([torch_names[root], *ast.unparse(node).split(".")[1:]])
                if callable(resolved(dotted)):  # a setting may be set
                    found.append(f"replaces {ast.unparse(node)}")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = ast.unparse(node.value)
            if any(target.startswith(f"vars({name}") for name in torch_names):
                found.append(f"replaces {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).split(".") for base in node.bases]
            dotted = [".".join([torch_names[base[0]], *base[1:]]) for base in bases if base[0] in torch_names]
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and is_private(one.name)]
            overridden = [(d, m) for d in dotted for m in methods if hasattr(resolved(d), m)]
            found += [f"{node.name}.{m} overrides {d}.{m}" for d, m in overridden if f"{d}.{m}" not in TO_OVERRIDE]
    return found


def test_private_parts_of_torch_are_named_in_their_two_files_alone() -> None:
    trees = {name: tree_of(path) for name, path in MODULES.items() if name not in PRIVATE_TO_TORCH}
    # Of transformers: classes of models declare them, and nothing public tells them.
    own = own_names(list(trees.values())) | {"_keep_in_fp32_modules_strict", "_no_split_modules", "_init_weights"}
    own |= {
        "_can_record_outputs",
        "_keys_to_ignore_on_load_unexpected",
        "_can_set_experts_implementation",
        "_apply_gate",
    }
    found = [f"{name}: {use}" for name, tree in trees.items() for use in private_uses(tree, own)]
    assert not found, "\n".join(found)
    for name in PRIVATE_TO_TORCH:
        assert private_uses(tree_of(MODULES[name]), set()), f"{name} names none and can go"
        assert own_imports()[name] <= set(PRIVATE_TO_TORCH)


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("import torch\ntorch._foreach_add_(x, 1)", "torch._foreach_add_"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world.pg_map", "dist.distributed_c10d._world"),
        ("from torch.distributed import _functional_collectives as c", "torch.distributed._functional_collectives"),
        ("def f():\n    import torch._dynamo", "torch._dynamo"),
        ("from torch.distributed.tensor._utils import offset", "torch.distributed.tensor._utils.offset"),
        ("group._get_backend(device)", "group._get_backend"),
        ("getattr(mesh, '_pg_registry', {})", "_pg_registry"),
        ("import torch.distributed as dist\ndist.send = mine", "replaces dist.send"),
        ("from torch.distributed.pipelining import schedules as s\nvars(s)['step'] = mine", "replaces vars(s)['step']"),
        ("from torch import nn\nclass M(nn.Module):\n    def _apply(self, fn): ...", "M._apply overrides torch.nn.Module._apply"),
    ],
)  # fmt: skip
def test_a_private_part_of_torch_elsewhere_is_found(code: str, use: str) -> None:
    assert any(use in found for found in private_uses(ast.parse(code), {"_mine"}))
    clean = "import torch\nclass A:\n    def _mine(self): return torch.add(self._mine(), row._replace(x=1))"
    assert private_uses(ast.parse(clean), {"_mine", "_replace"}) == []


# Rooms in which a module keeps what it calls from its constructor on, and what is assigned after construction all the
# same: to classes of transformers, whose constructors are not ours, and where a reason stands.
BUILT_ONCE = ("classes", "comm", "model", "moe", "optim", "parallel", "passes", "planner", "training")
ASSIGNED_LATER = {
    "automoe.classes.activations": [
        "setattr(module, name, nn.Parameter(parameter[:num_local].clone()))", "module.forward", "layer.forward",
    ],
    "automoe.classes.build": ["setattr(owner, other, None)", "setattr(probe, name, _Returns(hidden))"],
    "automoe.classes.expert_parallel": ["module.forward"],
    "automoe.classes.experts": ["experts.forward"],
    "automoe.classes.family": ["config.attention"],
    "automoe.classes.lora": ["experts.forward"],
    "automoe.classes.model": ["module.reset_buffers"],
    # a record of torch's, not a module; and a recipe may set the loss of a run
    "automoe.parallel.pipeline": ["op.group"],
    "automoe.parallel.runner": ["part.loss"],
}  # fmt: skip


def called_names(trees: list[ast.Module]) -> set[str]:
    """Names of methods, and of attributes that a class calls: ``attend`` of ``self.attend(x)``."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef) and not one.decorator_list}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self."):
            names.add(ast.unparse(node.func).removeprefix("self."))
    return names


def assigned_later(tree: ast.Module, names: set[str]) -> list[str]:
    """Assignments to attributes of these ``names`` outside of constructors, in order."""
    constructors = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    inside = {id(node) for one in constructors for node in ast.walk(one)}
    found = []
    for node in (node for node in ast.walk(tree) if id(node) not in inside):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names:
            if ast.unparse(node.value) != "ctx":  # of an autograd function
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found.append((node.lineno, ast.unparse(node)))
    return [what for _, what in sorted(found)]


def test_what_a_module_calls_is_decided_when_it_is_built() -> None:
    rooms = {
        name: tree_of(path)
        for name, path in MODULES.items()
        if name.split(".")[1:2] and name.split(".")[1] in BUILT_ONCE
    }
    names = called_names(
        [tree for name, tree in rooms.items() if name.split(".")[1] not in ("optim", "planner", "training")]
    )
    found = {name: later for name, tree in rooms.items() if (later := assigned_later(tree, names))}
    assert found == ASSIGNED_LATER


def test_calls_that_are_replaced_are_found() -> None:
    tree = ast.parse(
        "class A:\n"
        "    def __init__(self):\n        self.attend = f\n"
        "    def run(self):\n        return self.attend()\n"
        "def later(a, norms):\n"
        "    a.attend = wrapped(a.attend)\n    a.part.run, a.size = g, 3\n"
        "    for norm in norms:\n        setattr(norm, name, wrapped)\n"
    )
    assert called_names([tree]) == {"__init__", "run", "attend"}
    assert assigned_later(tree, called_names([tree])) == ["a.attend", "a.part.run", "setattr(norm, name, wrapped)"]


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []
