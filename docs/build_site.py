"""Assemble the pages of the site in build/site-docs: ``make site``.

The pages are those of docs/ and of the top of the checkout, with links into the checkout turned into links to copies, so
that the site needs no other server. Added are a report of a run, a plan of each flagship, and pages for the API reference.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "site-docs"
SOURCES = "source"  # folder of the site with copies of other files of the checkout
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",  # docs/security.md is another page
    "AGENTS.md": "agents.md",
    "tests/README.md": "tests.md",
}
FLAGSHIPS = {
    "dsv3_671b": "DeepSeek-V3 671B",
    "kimi_k2_1t_a32b": "Kimi-K2 1T",
    "glm45_355b_a32b": "GLM-4.5 355B",
    "qwen3_235b_a22b": "Qwen3 235B-A22B",
    "mixtral_8x22b": "Mixtral 8x22B",
    "gpt_oss_120b": "GPT-OSS 120B",
    "qwen3_next_80b_a3b": "Qwen3-Next 80B-A3B",
    "qwen3_30b_a3b": "Qwen3 30B-A3B",
    "moonlight_16b_a3b": "Moonlight 16B-A3B",
}
# Modules whose docstrings are the API reference, by the page that shows them.
API = {
    "train and convert": ["automoe.launch.from_python", "automoe.hf.api", "automoe.hf.write"],
    "recipes": ["automoe.training.step", "automoe.training.validate", "automoe.run.run", "automoe.training.context", "automoe.data.loader"],
    "parallelism": ["automoe.parallel.mesh", "automoe.classes.expert_parallel", "automoe.parallel.parallelize"],
    "mixture of experts": ["automoe.moe.router", "automoe.moe.layer", "automoe.moe.experts", "automoe.moe.dispatch.base"],
    "plugins": ["automoe.config.plugins", "automoe.hf.families.family", "automoe.config.tier", "automoe.data.corpora", "automoe.model.loss"],
    "verify": ["automoe.verify.run", "automoe.verify.compare", "automoe.verify.pool"],
    "checkpoints": ["automoe.checkpoint.store", "automoe.training.state"],
    "errors": ["automoe.errors"],
}  # fmt: skip
RUN = (
    "model.hidden_size=64",
    "model.num_layers=2",
    "mesh.pp=1",
    "mesh.ep=2",
    "launch.num_ranks=2",
    "train.steps=40",
    "train.seq_len=64",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.val_every=10",
    "train.val_batches=1",
    "optim.warmup_steps=5",
    "optim.lr=3e-3",
    "data.max_bytes=1000000",
    "checkpoint.every=0",
    "checkpoint.export_hf=false",
)
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
# Found after the pages that answer: a word in a function's name is no answer to a newcomer.
FOUND_LATE = "---\nsearch: {boost: 0.2}\n---\n"
LATE = ("AGENTS.md", "CHANGELOG.md", "questions.md")
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def target_of(file: Path) -> Path:
    """Where a file of the checkout lies on the site."""
    name = file.relative_to(ROOT).as_posix()
    if name in TOP:
        return PAGES / TOP[name]
    if name.startswith("docs/") and file.suffix != ".py":
        return PAGES / name.removeprefix("docs/")
    return PAGES / SOURCES / name


def with_links_of_the_site(text: str, page: Path) -> str:
    """``text`` of ``page``, a file of the checkout; what it links to and is no page itself is copied."""

    def moved(match: re.Match[str]) -> str:
        wanted = (page.parent / match[2]).resolve()
        if not wanted.exists():  # the build reports it
            return match[0]
        if wanted.is_dir():
            wanted = wanted / "README.md" if (wanted / "README.md").exists() else wanted
        target = target_of(wanted)
        if wanted.is_file() and target.suffix != ".md" and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(wanted, target)
        elif wanted.is_file() and SOURCES in target.parts and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(UNSEARCHED + with_links_of_the_site(wanted.read_text(), wanted))
        elif wanted.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            target /= "index.md"
            files = sorted(path for path in wanted.iterdir() if path.is_file())
            lines = [f"- [{path.name}]({path.name})" for path in files]
            target.write_text(UNSEARCHED + "\n".join([f"# {wanted.name}", "", *lines, ""]))
            for path in files:
                shutil.copy(path, target.parent)
        here = target_of(page).parent
        return match[1] + Path(*[".."] * len(here.relative_to(PAGES).parts), target.relative_to(PAGES)).as_posix()

    return LINK.sub(moved, text)


def write_pages() -> None:
    for page in [*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")]:
        target = target_of(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        late = FOUND_LATE if page.name in LATE else ""
        target.write_text(late + with_links_of_the_site(page.read_text(), page))
    shutil.copytree(ROOT / "docs" / "images", PAGES / "images", dirs_exist_ok=True)
    (PAGES / "javascripts").mkdir()
    shutil.copy(ROOT / "docs" / "iframe-worker.js", PAGES / "javascripts")


def write_api() -> None:
    folder = PAGES / "api"
    folder.mkdir()
    index = ["# API reference\n", "From the docstrings of the modules that recipes, plugins and scripts use.\n"]
    for title, modules in API.items():
        name = title.replace(" ", "-") + ".md"
        index.append(f"- [{title.capitalize()}]({name}): " + ", ".join(f"`{module}`" for module in modules))
        (folder / name).write_text(
            FOUND_LATE + f"# {title.capitalize()}\n\n" + "\n".join(f"::: {m}\n" for m in modules)
        )
    (folder / "index.md").write_text(FOUND_LATE + "\n".join(index) + "\n")


def automoe(*words: str) -> str:
    """What ``automoe`` prints."""
    command = [sys.executable, "-m", "automoe.cli", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def write_gallery() -> None:
    """A plan of each flagship as a page of its own, and a table of them."""
    folder = PAGES / "plans"
    folder.mkdir()
    lines = [
        "# Plans of the flagships",
        "",
        "What `automoe plan --config-name NAME html=plan.html` writes, for the mesh of each primary configuration. No"
        " number here was measured on GPUs: [how far plans are from published runs](plan_accuracy.md).",
        "",
        "| model | GPUs | mesh | memory of the fullest GPU, reserve included | step | tokens/s | MFU |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for name, title in FLAGSHIPS.items():
        plan = json.loads(automoe("plan", "--config-name", name, "--json"))
        automoe("plan", "--config-name", name, f"html={folder / name}.html")
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep_shard", "ep", "etp")
        mesh = " ".join(f"{axis}{plan['mesh'][axis]}" for axis in axes if plan["mesh"][axis] > 1)
        time = plan["time"]
        lines.append(
            f"| [{title}](plans/{name}.html) | {plan['mesh']['world_size']:,} | {mesh} | {plan['needed'] / 2**30:.0f} GiB | "
            f"{time['seconds']:.1f} s | {time['tokens_per_second']:,.0f} | {time['mfu']:.1%} |"
        )
    (PAGES / "gallery.md").write_text(FOUND_LATE + "\n".join(lines) + "\n")


def write_report() -> None:
    """A run of seconds, and its report as it stands in the run directory."""
    run_dir = ROOT / "build" / "site-run"
    shutil.rmtree(run_dir, ignore_errors=True)
    automoe("train", f"run_dir={run_dir}", *RUN)
    shutil.copy(run_dir / "report.html", PAGES / "report.html")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    write_pages()
    write_api()
    write_gallery()
    write_report()


if __name__ == "__main__":
    main()
