"""What the figures were measured on: processor, caches, threads, commit, and how busy the machine was."""

import datetime
import os
import pathlib
import platform
import re
import subprocess

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def cpuinfo():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^([^\t\n]+?)\s*:\s*(.*)$", text.split("\n\n")[0], re.M))


def cpu_name():
    """The processor's name; family and model with it, since hypervisors cut names down to "AMD EPYC"."""
    info = cpuinfo()
    if "model name" not in info:
        return platform.processor() or platform.machine()
    return f"{info['model name']} (family {info['cpu family']} model {info['model']})"


def isa():
    flags = cpuinfo().get("flags", "").split()
    if "avx512f" in flags:
        if "amx_bf16" in flags:
            return "avx512-amx"
        return "avx512-bf16" if "avx512_bf16" in flags else "avx512"
    if "avx2" in flags:
        return "avx2"
    return {"aarch64": "neon", "arm64": "neon"}.get(platform.machine(), "baseline")


def is_amd():
    return cpuinfo().get("vendor_id") == "AuthenticAMD"


def cores():
    """One CPU number per physical core that this process may use: two hyperthreads share the units that the ceilings fill."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))
    chosen = {}
    for cpu in allowed:
        topology = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            core = ((topology / "physical_package_id").read_text(), (topology / "core_id").read_text())
        except OSError:
            core = cpu
        chosen.setdefault(core, cpu)
    return list(chosen.values())


def last_level_cache_bytes():
    sizes = []
    for index in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        number, unit = re.match(r"(\d+)([KMG])", (index / "size").read_text()).groups()
        sizes.append(int(number) << {"K": 10, "M": 20, "G": 30}[unit])
    return max(sizes, default=32 << 20)


def available_bytes():
    try:
        return int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) << 10
    except (OSError, TypeError):
        return 8 << 30


def load():
    """Runnable processes over the last minute, 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def git(*words):
    try:
        return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.rstrip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def facts(threads):
    changed = [line[3:] for line in git("status", "--porcelain", "--", "crates", "bindings", "benches", "Cargo.lock").splitlines()]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "isa": isa(),
        "cores": len(cores()),
        "threads": threads,
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": changed,
        "load_before": round(load(), 2),
    }


def record_name(facts):
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((R|TM)\)|CPU|Processor", "", facts["cpu"]).lower()).strip("-")
    return f"{facts['date'][:10]}-{slug}-{facts['isa']}"
