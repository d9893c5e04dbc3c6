"""Tables of measurements that are not of stored runs: attacks, costs, speed, single studies.

Each function of `TABLES` reads files of benchmarks/results and returns the cells of one table, the
heading first. `benchmarks.tables` writes them into the pages beside the tables of stored runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from barter.recipes.recipe import find_recipe
from barter.recipes.stored import group_by_row, read_stored_runs, spread_over_seeds
from barter.runs.progress import format_bytes
from benchmarks import adversaries, htfllib, time_to_accuracy

RESULTS = Path(__file__).parent / "results"
RECIPES = Path(__file__).parent.parent / "src" / "barter" / "recipes"
Table = list[list[str]]
# The run whose logits were in half precision, as they are now.
STATISTICS = "dffke-reveal: CIFAR-100, alpha 1.0, statistics, rank=48, compression=8, mean prior 8"

# Labels of DFFKE's protections by their names in dffke-privacy.json; the number is epsilon.
PROTECTIONS = {
    "nothing": "none",
    "gaussian-8": "gaussian, 8",
    "gaussian-3": "gaussian, 3",
    "gaussian-1": "gaussian, 1",
    "means-8": "means, 8",
    "means-3": "means, 3",
    "means-1": "means, 1",
    "the-paper-s-noise": "the paper's noise",
    "noise-for-embeddings": '`reveal = "nothing"`',
    "noise-for-embeddings, noise=1": "the same, `noise=1`",
    "private-training-8": "private training, 8",
    "private-training-3": "private training, 3",
    "private-training-1": "private training, 1",
}
GUESSES = ("inversion: mean of the class", "inversion: nearest image of the class")
SYNTHETIC = "inversion: transfer images"
BY_EMBEDDINGS = "membership: nearest row, embeddings and weights"
BY_LOSS = "membership: loss threshold, weights"
# Methods as the pages spell them.
NAMES = {
    "fedavg": "FedAvg",
    "local": "local training",
    "lgfedavg": "LG-FedAvg",
    "fml": "FML",
    "fedproto": "FedProto",
    "fedtgp": "FedTGP",
    "fedkd": "FedKD",
    "fedaf": "FedAF",
    "dfrd": "DFRD",
    "dffke": "DFFKE",
}


def accuracy(file: Path, row: str, metric: str, at: int | None = None) -> str:
    """Return the mean accuracy of a stored row over seeds, in %.

    Args:
        file: The file of stored runs.
        row: The row's name.
        metric: The metric, such as global or server.
        at: The round; None for the last.
    """
    runs = group_by_row(read_stored_runs(file))[row]
    spread = spread_over_seeds(runs, metric, at)
    assert spread is not None, row
    return f"{100 * spread.mean:.1f}"


def megabytes(file: Path, row: str) -> float:
    """Return the MB of each of ten clients in the last round of a stored row, both ways."""
    runs = group_by_row(read_stored_runs(file))[row]
    return fmean(run.curve["bytes"][-1] or 0.0 for run in runs) / 1e7


def traffic_by_level() -> Table:
    """Return the megabytes of a DFFKE client in a round, by level of `reveal`."""
    levels = RESULTS / "dffke-reveal.jsonl"
    photographs = "dffke-reveal: CIFAR-100, alpha 1.0, photographs"
    mixtures = "dffke-reveal: CIFAR-100, alpha 1.0, mixtures"
    rows = {
        '`"images"`, share 0.6': (
            RESULTS / "averaging.jsonl",
            "averaging: dffke, partition.alpha=0.1",
        ),
        '`"mixtures"`, share 0.5': (levels, mixtures),
        '`"statistics"`, share 0.5, `rank = 48`, `compression = 8`': (levels, STATISTICS),
        '`"nothing"`, `substitute = "photographs"`, share 0.6': (levels, photographs),
    }
    return [["`reveal`", "MB"], *([name, f"{megabytes(*at):.1f}"] for name, at in rows.items())]


def overview() -> Table:
    """Return the README's table: accuracy and exposure of DFFKE, FedAvg, and their bounds."""
    default = RECIPES / "dffke-cifar100-alpha-1.0.jsonl"
    skewed = RECIPES / "dffke-cifar100-alpha-0.1.jsonl"
    averaging = RESULTS / "averaging.jsonl"
    fashion = RESULTS / "baselines-fashion-10k.jsonl"
    skewed_published = RESULTS / "dffke-cifar-paper-augmented.jsonl"
    levels = RESULTS / "paper-levels.jsonl"

    def averages(alpha: str) -> str:
        row = f"averaging: fedavg, partition.alpha={alpha}"
        early = accuracy(averaging, row, "server", 14)
        return f"{early}; {accuracy(averaging, row, 'server', 50)} after 50"

    def oracle(alpha: str) -> str:
        return accuracy(averaging, f"averaging: oracle, partition.alpha={alpha}", "global", 14)

    def statistics(alpha: str) -> str:
        name = f"dffke-cifar100-statistics-alpha-{alpha}"
        return accuracy(RECIPES / f"{name}.jsonl", name, "global", 14)

    def moments(alpha: str) -> str:
        row = f"paper-levels: moments, epsilon 8, partition.alpha={alpha}"
        return f"{accuracy(levels, row, 'global', 5)} after 5"

    def reported(alpha: str) -> str:
        figure = find_recipe(f"dffke-cifar100-alpha-{alpha}").paper
        assert figure is not None
        assert isinstance(figure.accuracy, float)
        return f"{figure.accuracy:.1f}"

    central = accuracy(averaging, "averaging: central, partition.alpha=1.0", "global", 50)
    dffke = "averaging: dffke, partition.alpha=0.1"
    preset = "dffke-cifar100-preset-paper"
    published = RECIPES / f"{preset}.jsonl"
    skewed_preset = "dffke-cifar-paper-augmented: CIFAR-100, alpha 0.1, preset paper"
    private = group_by_row(read_stored_runs(levels))[
        "paper-levels: moments, epsilon 8, partition.alpha=1.0"
    ]
    once = (
        fmean(run.total("bytes") or 0.0 for run in private) / private[0].settings["clients"] / 1e6
    )
    return [
        [
            "method",
            "networks",
            "CIFAR-100, alpha 1.0",
            "alpha 0.1",
            "MB a round",
            "Fashion-MNIST",
            "what it exposes",
        ],
        [
            "local training only",
            "any",
            accuracy(default, "dffke-cifar100-alpha-1.0", "trained", 1),
            accuracy(skewed, "dffke-cifar100-alpha-0.1", "trained", 1),
            "0",
            accuracy(fashion, "baselines-fashion-10k: local", "global", 5),
            "nothing",
        ],
        [
            "**DFFKE**, barter's default",
            "any",
            f"**{accuracy(default, 'dffke-cifar100-alpha-1.0', 'global', 14)}**",
            f"**{accuracy(skewed, 'dffke-cifar100-alpha-0.1', 'global', 14)}**; "
            f"{accuracy(averaging, dffke, 'global', 50)} after 50",
            f"{megabytes(averaging, dffke):.0f}",
            f"**{accuracy(fashion, 'baselines-fashion-10k: dffke', 'global', 5)}**",
            "**shows near-copies of private images to every client**; weights, embeddings and "
            "labels to the server",
        ],
        [
            'DFFKE, `reveal = "statistics"`',
            "any",
            statistics("1.0"),
            statistics("0.1"),
            f"{megabytes(RESULTS / 'dffke-reveal.jsonl', STATISTICS):.0f}",
            "",
            "images decoded from samples of class statistics to every client: [57 % are nearer to "
            "offered images than to others by pixels, 69 % by features](docs/results/dffke-levels.md), "
            "chance is 50; weights and statistics to the server",
        ],
        [
            "[class moments](docs/methods/moments.md), ε = 8",
            "any",
            moments("1.0"),
            moments("0.1"),
            f"{once:.1f} once",
            accuracy(fashion, "baselines-fashion-10k: moments, epsilon 8", "global", 5),
            "noisy sums of fixed features to the server, Gaussians and a decoder made of them to "
            "every client: **a guarantee for every training image**, for the whole run",
        ],
        [
            "DFFKE as published, [as far as the paper is clear](docs/results/dffke-preset.md) "
            '(`preset = "paper"`)',
            "any",
            f"{accuracy(published, preset, 'global', 14)}; "
            f"{accuracy(published, preset, 'global', 59)} after 59",
            f"{accuracy(skewed_published, skewed_preset, 'global', 4)} after 4",
            f"{megabytes(published, preset):.0f}",
            "",
            "decoder and translated embeddings, from which images of private data are decoded, to "
            "every client; as the default to the server",
        ],
        [
            "the paper's own figures (128 pixels, up to 50 rounds)",
            "any",
            reported("1.0"),
            reported("0.1"),
            "",
            "",
            "",
        ],
        [
            "FedAvg",
            "one for all",
            averages("1.0"),
            averages("0.1"),
            f"{megabytes(averaging, 'averaging: fedavg, partition.alpha=1.0'):.0f}",
            accuracy(fashion, "baselines-fashion-10k: fedavg", "server", 5),
            "weights to the server, their average to every client",
        ],
        [
            "*oracle*: DFFKE with private images in place of decoded ones",
            "any",
            oracle("1.0"),
            oracle("0.1"),
            "",
            "",
            "private images: a reference, not a method",
        ],
        [
            "*central*: training on all images",
            "any",
            f"{central}, 50 epochs",
            "the same run",
            "",
            f"{accuracy(fashion, 'baselines-fashion-10k: central', 'global', 5)}, 5 epochs",
            "private images: a reference, not federated",
        ],
    ]


def encoded_traffic() -> Table:
    """Return the megabytes of a DFFKE client in the last measured round, by profile of [wire]."""
    exact = group_by_row(read_stored_runs(RESULTS / "averaging.jsonl"))
    encoded = group_by_row(read_stored_runs(RESULTS / "dffke-wire.jsonl"))
    rows = {
        "`exact`": exact["averaging: dffke, partition.alpha=0.1, 14 rounds"],
        "`lean`": encoded["dffke-wire: lean"],
        '`lean`, `images = "webp-7bit"`': encoded["dffke-wire: lean, images=webp-7bit"],
        '`small`, `images = "webp-90"`': encoded["dffke-wire: small, images=webp-90"],
        "`small`": encoded["dffke-wire: small"],
    }
    table = [["profile", "up", "down", "sum", "times fewer"]]
    most = None
    for label, runs in rows.items():
        up, down = (
            fmean(run.curve[way][-1] or 0.0 for run in runs) / 1e6 for way in ("up", "down")
        )
        most = most or up + down
        fewer = "" if label == "`exact`" else f"{most / (up + down):.1f}"
        table.append([label, f"{up:.1f}", f"{down:.1f}", f"{up + down:.1f}", fewer])
    return table


def stored(name: str) -> Any:
    """Return the content of a file of benchmarks/results."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def _reconstruction(attacks: Sequence[dict[str, float]]) -> str:
    """Return PSNR and rate of found images, each of the best attack."""
    psnr = max(values["psnr"] for values in attacks)
    found = 100 * max(values["found"] for values in attacks)
    rate = "100" if found == 100 else f"{found:.1f}"
    return f"{psnr:.1f} dB, {rate}%"


def _inversions(results: Mapping[str, dict[str, float]]) -> list[dict[str, float]]:
    """Return what the reconstructions from embeddings achieve; empty if there were none."""
    others = (*GUESSES, SYNTHETIC)
    return [
        values
        for attack, values in results.items()
        if attack.startswith("inversion") and attack not in others and values
    ]


def attacks(data: str) -> Table:
    """Return what attacks on DFFKE achieve, by protection.

    Args:
        data: The data set's key in dffke-privacy.json.
    """
    heading = [
        "protection",
        "ε of the run",
        "global test",
        "local test",
        "best reconstruction: PSNR, found",
    ]
    heading += ["synthetic images: PSNR, found", "membership AUC", "class frequencies"]
    table = [heading]
    measured = stored("dffke-privacy.json")[data]
    for name, label in PROTECTIONS.items():
        run = measured[name]
        results: dict[str, dict[str, float]] = run["attacks"]
        inversions = _inversions(results)
        by_embeddings = results.get(BY_EMBEDDINGS)
        by_loss = results[BY_LOSS]
        membership = [values["auc"] for values in (by_embeddings, by_loss) if values]
        distances = [
            values["distance"]
            for attack, values in results.items()
            if attack.startswith("labels") and attack != "labels: all classes alike"
        ]
        epsilon = run["epsilon"]
        protected = SYNTHETIC not in results
        table.append(
            [
                label,
                "∞" if epsilon == "infinity" else f"{epsilon:.0f}",
                f"{run['rounds'][-1]:.1f}",
                f"{run['own']:.1f}",
                _reconstruction(inversions) if inversions else "none",
                "of no private image" if protected else _reconstruction([results[SYNTHETIC]]),
                ", ".join(f"{auc:.2f}" for auc in membership),
                f"{min(distances):.2f}",
            ]
        )
    return table


def attacks_in_short() -> Table:
    """Return what attacks on DFFKE find on digits: without protection, and with the strongest."""
    table = [
        [
            "what is sent",
            "private images found",
            "membership (AUC; 0.5 is chance)",
            "global accuracy",
        ]
    ]
    labels = {
        "nothing": "DFFKE, default: embeddings",
        "noise-for-embeddings": 'DFFKE, `reveal = "nothing"`',
        "private-training-8": "DFFKE, private training, ε = 8",
    }
    measured = stored("dffke-privacy.json")["digits"]
    for name, label in labels.items():
        results = measured[name]["attacks"]
        found = []
        if inversions := _inversions(results):
            share = max(values["found"] for values in inversions)
            found.append(f"{100 * share:.4g} % from embeddings")
        if SYNTHETIC in results:
            found.append(f"{100 * results[SYNTHETIC]['found']:.1f} % from synthetic images")
        by_embeddings = results.get(BY_EMBEDDINGS)
        membership = f"{results[BY_LOSS]['auc']:.2f}, by the loss"
        if by_embeddings:
            membership = f"{by_embeddings['auc']:.2f}, by embeddings"
        accuracy = f"{measured[name]['rounds'][-1]:.1f}"
        table.append([label, ", ".join(found) or "none", membership, accuracy])
    return table


def malformed_answers() -> Table:
    """Return what became of mutated answers, over all methods."""
    headings = {
        "answers": "answers",
        "ran": "rounds run",
        "survived": "survived",
        "refused": "refused as that client's failure",
        "ended": "run ended",
        "blamed": "another client failed",
        "non-finite": "state not finite",
        "no resume": "could not resume",
    }
    rows = stored("fuzz-answers.json")["rows"]
    return [
        list(headings.values()),
        [f"{sum(row[key] for row in rows):,}" for key in headings],
    ]


def adversarial_clients(data: str) -> Table:
    """Return accuracies of honest clients beside adversarial ones.

    Args:
        data: The data set: digits or fashion.
    """
    return adversaries.table_cells(adversaries.finished(adversaries.RESULTS), data)


def simulated_time() -> Table:
    """Return accuracies and costs of methods on simulated phones."""
    runs = time_to_accuracy.read(time_to_accuracy.RESULTS, "mobile")
    heading, *rows = time_to_accuracy.table_cells(runs, target=0.7)
    return [heading, *([f"`{method}`", *cells] for method, *cells in rows)]


def private_statistics() -> Table:
    """Return accuracies of class statistics and of local training, by ε; means over splits."""
    labels: dict[tuple[str, float | None], str] = {
        ("statistics", None): "discriminant of all clients, any alpha",
        ("statistics, means alone", None): "the same without covariance: nearest mean",
    }
    for skew in (1.0, 0.1):
        start = f"local only, alpha {skew}"
        labels["local: own statistics", skew] = f"{start}: discriminant of one client"
        labels["local: head by DP-SGD", skew] = f"{start}: linear head by DP-SGD"
    rows = stored("private-statistics.json")["rows"]
    epsilons = list(dict.fromkeys(row["epsilon"] for row in rows))
    first, *others = (f"{value:g}" for value in epsilons if value is not None)
    table = [["method", f"ε = {first}", *others, "without noise"]]
    for (method, alpha), label in labels.items():
        cells = []
        for epsilon in epsilons:
            accuracies = [
                accuracy
                for row in rows
                if row["method"] == method
                and row["epsilon"] == epsilon
                and alpha in (None, row["alpha"])
                for accuracy in row["accuracy"]
            ]
            cells.append(f"{100 * fmean(accuracies):.1f}")
        table.append([label, *cells])
    return table


def decoded_images() -> Table:
    """Return what a network learns from decoded images, and its teacher; means over seeds."""
    rows = stored("decoded-images.json")
    table = [["what is decoded", "discriminant", "small-cnn that learns from it"]]
    for name in dict.fromkeys(row["row"] for row in rows):
        chosen = [row for row in rows if row["row"] == name]
        means = [fmean(row[key] for row in chosen) for key in ("discriminant", "student")]
        table.append([name, *(f"{mean:.1f}" for mean in means)])
    return table


def embedding_sizes() -> Table:
    """Return how large the embeddings of each network are, and how much their sizes differ."""
    table = [
        [
            "network",
            "median size",
            "root mean square of all",
            "largest, times the median",
            "larger than five times the median",
        ]
    ]
    for row in stored("embedding-sizes.json"):
        table.append(
            [
                row["network"],
                f"{row['median']:.2f}",
                f"{row['rms']:.2f}",
                f"{row['largest']:.1f}",
                f"{100 * row['share_of_large']:.1f} %",
            ]
        )
    return table


def copy_interval() -> Table:
    """Return how far rates of copies vary by chance, and how often their intervals hold."""
    table = [
        [
            "average of",
            "private images that are a nearest one",
            "effective number",
            "standard deviation, points",
            "the interval contains chance",
            "one that counts all 2,000 images",
        ]
    ]
    for row in stored("copy-interval.json"):
        images = "1 image" if row["averaged"] == 1 else f"{row['averaged']} images"
        shares = (f"{100 * row[key]:.1f} %" for key in ("covered", "covered_by_images"))
        table.append(
            [
                images,
                f"{row['nearest']:,}",
                f"{row['effective']:.0f}",
                f"{100 * row['deviation']:.1f}",
                *shares,
            ]
        )
    return table


def _clients_rows(file: str) -> list[dict[str, Any]]:
    """Return the rows of a measurement by number of clients, by method and number."""
    rows: list[dict[str, Any]] = stored(file)["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    return sorted(rows, key=lambda row: (methods.index(row["method"]), row["clients"]))


def _clients_label(row: Mapping[str, Any]) -> list[str]:
    """Return the first two cells of a row: the method and the number of clients."""
    peers = f", {row['peers']} `peers`" if "peers" in row else ""
    return [NAMES[row["method"]] + peers, f"{row['clients']:,}"]


def clients_cpu() -> Table:
    """Return what a round costs on a CPU by the number of clients, now and all in memory."""
    heading = ["method", "clients", "s per round before", "CPU s per round now"]
    heading += ["peak MiB before", "peak MiB now"]
    heading += ["MiB written per round before", "MiB written per round now"]
    table = [heading]
    earlier = {
        (row["method"], row["clients"]): row for row in stored("clients-cpu-before.json")["rows"]
    }
    for row in _clients_rows("clients-cpu.json"):
        before = earlier.get((row["method"], row["clients"]))
        cells = ["" if before is None else f"{before['round_s']:.1f}", f"{row['round_cpu_s']:.2g}"]
        cells += ["" if before is None else f"{before['peak_mib']:.0f}", f"{row['peak_mib']:.0f}"]
        cells.append("" if before is None else f"{before['written_mib']:.1f}")
        cells.append(f"{row['written_mib']:.1f}")
        table.append([*_clients_label(row), *cells])
    return table


def clients_gpu() -> Table:
    """Return what a round costs on a GPU by the number of clients."""
    heading = ["method", "clients", "s per round"]
    table = [[*heading, "peak MiB of host memory", "MiB of GPU memory"]]
    for row in _clients_rows("clients-cuda.json"):
        cells = [f"{row['round_s']:.2f}", f"{row['peak_mib']:,.0f}", f"{row['device_mib']:,.0f}"]
        table.append([*_clients_label(row), *cells])
    return table


def encodings() -> Table:
    """Return what encodings of images save, lose and take."""
    heading = ["encoding", "times smaller than half floats", "error (RMS)", "PSNR"]
    table = [[*heading, "encode", "decode"]]
    for row in stored("encodings.json")["rows"]:
        cells = [f"{row['times_smaller']:.1f}", f"{row['rms']:.2g}", f"{row['psnr']:.1f} dB"]
        cells += [f"{row[f'{way}_mb_per_s']:,.0f} MB/s" for way in ("encode", "decode")]
        table.append([f"`{row['encoding']}`", *cells])
    return table


def wire_profiles() -> Table:
    """Return bytes per client and round, and accuracies, by profile; means over seeds."""
    rows = stored("wire-digits.json")["rows"]
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    table = [["method", *profiles, *(f"accuracy, {profile}" for profile in profiles)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        sizes = []
        accuracies = []
        for profile in profiles:
            runs = [row for row in rows if (row["method"], row["profile"]) == (method, profile)]
            both_ways = [run["megabytes_up"] + run["megabytes_down"] for run in runs]
            sizes.append(fmean(both_ways))
            accuracies.append(f"{fmean(run['accuracy'] for run in runs):.1f} %")
        exact, *encoded = sizes
        cells = [format_bytes(1e6 * exact)]
        cells += [f"{format_bytes(1e6 * size)} ({exact / size:.1f}x)" for size in encoded]
        table.append([NAMES[method], *cells, *accuracies])
    return table


def digits_20_rounds() -> Table:
    """Return accuracies of methods that share heads or class means, on digits."""
    keys = ("global", "local", "shared_global", "shared_local")
    table = [["method", "global test", "local test", *(f"`{key}`" for key in keys[2:]), "bytes"]]
    for row in stored("digits-20-rounds.json")["rows"]:
        cells = [
            f"{row[key]['mean']:.1f} ± {row[key]['deviation']:.1f}" if key in row else "-"
            for key in keys
        ]
        table.append([row["method"], *cells, format_bytes(1e6 * row["megabytes"])])
    return table


def fedzge_statistics() -> Table:
    """Return accuracies of FedZGE by the statistics that networks are evaluated with."""
    table = [['`preset = "paper"`', "clients, all classes", "clients, local test", "server"]]
    for row in stored("fedzge-statistics.json")["rows"]:
        cells = [
            " ".join(f"{value:.1f}" for value in row.get(key, ()))
            for key in ("global", "local", "server")
        ]
        table.append([f"`{row['network']}`, {row['statistics']}", *cells])
    return table


def submodels_statistics() -> Table:
    """Return accuracies of submodel methods by the source of their statistics."""
    columns = {
        "afterwards": "`afterwards`",
        "global": "`global`",
        "one_pass": "one pass over all images, mixed",
    }
    table = [["server's model, %", "network", *columns.values()]]
    for row in stored("submodels-statistics.json")["rows"]:
        cells = []
        for key in columns:
            seeds = " ".join(f"{value:.1f}" for value in row[key])
            cells.append(f"{fmean(row[key]):.1f} ({seeds})")
        table.append([f"`{row['method']}`", f"`{row['network']}`", *cells])
    return table


def levels_under_attack() -> Table:
    """Return what attacks on DFFKE achieve at each level of `reveal`, as means over seeds."""
    heading = ["`reveal`", "copies, by pixels", "by features", "best reconstruction: PSNR, found"]
    heading += ["best match of offered and of other images: PSNR"]
    heading += ["membership AUC: loss", "RMIA", "nearest embedding", "class frequencies"]
    table = [heading]
    file = stored("dffke-levels-attacks.json")
    chance = set()
    for level, by_seed in file["levels"].items():
        runs = list(by_seed.values())
        copies = []
        for by in ("pixels", "features"):
            found = [run.get(f"copies: nearest by {by}", {}) for run in runs]
            chance |= {round(100 * values["chance"]) for values in found if values}
            copies.append(_mean(found, "copies", "{:.0%}"))
        inversions = [
            [
                values
                for attack, values in run.items()
                if attack.startswith("inversion") and attack not in GUESSES
            ]
            for run in runs
        ]
        best = "none"
        if all(inversions):
            psnr = fmean(max(values["psnr"] for values in found) for found in inversions)
            rate = fmean(max(values["found"] for values in found) for found in inversions)
            best = f"{psnr:.1f} dB, {rate:.0%}"
        again = file["seed 0 again"]["levels"].get(level, {})
        match = f"{again['psnr']:.1f}, {again['psnr_not_offered']:.1f} dB" if again else "-"
        membership = [
            _mean([run.get(f"membership: {attack}", {}) for run in runs], "auc", "{:.2f}")
            for attack in (
                "loss threshold, weights",
                "RMIA with 4 shadow runs, weights",
                "nearest row, embeddings and weights",
            )
        ]
        distances = [
            values["distance"]
            for run in runs
            for attack, values in run.items()
            if attack.startswith("labels") and attack != "labels: all classes alike"
        ]
        distances += [again["distance"]] if again else []
        frequencies = f"{min(distances):.2f}" if distances else "-"
        table.append([level, *copies, best, match, *membership, frequencies])
    (by_chance,) = chance
    table.append(["by chance, or a guess", f"{by_chance}%", f"{by_chance}%", *_guess(file)])
    return table


def _guess(file: dict[str, Any]) -> list[str]:
    """Return the cells of `levels_under_attack` for guesses that use no upload."""
    runs = list(file["levels"]["images"].values())
    psnr = fmean(max(run[guess]["psnr"] for guess in GUESSES) for run in runs)
    rate = fmean(max(run[guess]["found"] for guess in GUESSES) for run in runs)
    distance = _mean([run["labels: all classes alike"] for run in runs], "distance", "{:.2f}")
    return [f"{psnr:.1f} dB, {rate:.0%}", "-", "0.50", "0.50", "0.50", distance]


def _mean(runs: Sequence[dict[str, float]], key: str, pattern: str) -> str:
    """Return the mean of a value over runs, or "-" if no run has it."""
    known = [values[key] for values in runs if key in values]
    return pattern.format(fmean(known)) if known else "-"


def epsilon() -> Table:
    """Return epsilon by barter and by other accountants."""
    table = [["setting", "barter", "dp-accounting", "Opacus, PRV", "Opacus, RDP"]]
    for setting, values in stored("audit.json")["epsilon"].items():
        below = values["opacus_prv_below"]
        prv = "" if values["opacus_prv"] is None else f"{values['opacus_prv']:.3f}"
        if below is not None:
            prv = f"{below:.3f} to {prv}"
        rdp = "" if values["opacus_rdp"] is None else f"{values['opacus_rdp']:.3f}"
        table.append(
            [setting, f"{values['barter']:.3f}", f"{values['dp_accounting']:.3f}", prv, rdp]
        )
    return table


def overhead() -> Table:
    """Return the time of a round and of its passes, by method."""
    heading = ["method", "a round, s", "passes, s", "optimizers, s", "round / passes"]
    heading += ["round / (passes + optimizers)", "round / passes, x86"]
    table = [heading]
    elsewhere = {row["method"]: row for row in stored("overhead-x86.json")["rows"]}
    for row in stored("overhead.json")["rows"]:
        x86 = elsewhere.get(row["method"])
        spent = row["passes"] + row["updates"]
        cells = [f"{row[key]:.2f}" for key in ("round", "passes", "updates")]
        cells += [f"{row['round'] / row['passes']:.2f}", f"{row['round'] / spent:.2f}"]
        cells.append("" if x86 is None else f"{x86['round'] / x86['passes']:.2f}")
        table.append([row["method"], *cells])
    return table


def beside_htfllib() -> Table:
    """Return seconds of a round and accuracy by round of HtFLlib and of barter, by method.

    Seconds are medians of the rounds after the first. "Computing" is barter's without what it
    writes to the disk.
    """
    heading = [
        "networks",
        "method",
        "HtFLlib, s",
        "barter, s",
        "ratio",
        "computing, s",
        "evaluation, s",
    ]
    table = [[*heading, "accuracy, HtFLlib", "accuracy, barter"]]
    for theirs, ours in htfllib.pair_runs(stored("htfllib.json")["runs"]):
        seconds = [htfllib.later_seconds(run) for run in (theirs, ours)]
        computing = median(
            entry["phases"]["round"] - entry["phases"]["evaluate"] for entry in ours["rounds"][1:]
        )
        evaluation = [htfllib.later_seconds(run, "evaluation") for run in (theirs, ours)]
        accuracies = [
            ", ".join(f"{100 * entry['accuracy']:.1f}" for entry in run["rounds"])
            for run in (theirs, ours)
        ]
        cells = [f"{value:.2f}" for value in seconds]
        cells += [f"{seconds[0] / seconds[1]:.1f}", f"{computing:.2f}"]
        cells.append(" / ".join(f"{value:.2f}" for value in evaluation))
        networks = f"{ours['settings']['models']}, {ours['settings']['size']} px"
        if ours["precision"] != "auto":
            networks += f", {ours['precision']}"
        table.append([networks, NAMES[ours["method"]], *cells, *accuracies])
    return table


def protection() -> Table:
    """Return the time of rounds without and with privacy protection."""
    table = [["what", "plain, s", "protected, s", "factor"]]
    for row in stored("privacy.json")["rows"]:
        what = row["what"].replace("means of classes", "class means")
        cells = [f"{row['plain']:.2f}", f"{row['protected']:.2f}", f"{row['factor']:.3f}"]
        table.append([what, *cells])
    return table


def flower_calls() -> Table:
    """Return the seconds of an empty call, by the number of sites."""
    table = [["sites", "barter's node", "CPU s", "of which SuperLink", "Flower's SuperNode"]]
    earlier = stored("flower-polling.json")["nodes"]
    for sites, call in stored("flower.json")["nodes"].items():
        cpu = call["barter_cpu"]
        other = earlier[sites].get("flower")
        cells = [f"{call['barter']:.2f} s", f"{sum(cpu.values()):.2f}", f"{cpu['SuperLink']:.2f}"]
        table.append([sites, *cells, f"{other:.1f} s" if other else ""])
    return table


def flower_calls_polling() -> Table:
    """Return the seconds of an empty call with and without held polls, by the number of sites."""
    table = [["sites", "polls are held", "by polling"]]
    held = stored("flower.json")["nodes"]
    for sites, call in stored("flower-polling.json")["nodes"].items():
        table.append([sites, f"{held[sites]['barter']:.2f} s", f"{call['barter']:.2f} s"])
    return table


def flower_rounds(file: str, polling: str | None = None) -> Table:
    """Return the seconds of a round in one process and on Flower.

    Args:
        file: The stored measurement.
        polling: A stored measurement of barter without held polls, which is shown beside it.
    """
    table = [["clients", "a round in one process", "on Flower", "ratio"]]
    others = stored(polling)["rounds"] if polling else {}
    if polling:
        table[0].append("on Flower, by polling")
    for clients, seconds in stored(file)["rounds"].items():
        ratio = seconds["flower"] / seconds["local"]
        shown = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
        row = [clients, f"{seconds['local']:.2f} s", f"{seconds['flower']:.1f} s", shown]
        if polling:
            row.append(f"{others[clients]['flower']:.1f} s")
        table.append(row)
    return table


def flower_megabytes() -> Table:
    """Return the seconds of a call by profile and size of its payload, sent and returned."""
    table = [["tree", "profile", "sent", "seconds", "CPU s", "of which SuperLink", "error (RMS)"]]
    for profile, measured in stored("flower.json")["calls"].items():
        for row in measured["rows"][1:]:  # The first call also starts the worker.
            cpu = row["cpu"]
            error = f"{100 * row['error']:.2g} %" if row["error"] else "none"
            cells = [f"{row['sent_mb']:,.1f} MB", f"{row['seconds']:.1f}"]
            cells += [f"{sum(cpu.values()):.1f}", f"{cpu['SuperLink']:.1f}", error]
            size = f"{row['mb']:.0f} MB" if row["mb"] else "empty"
            table.append([size, f"`{profile}`", *cells])
    return table


def flower_memory() -> Table:
    """Return the peak memory of each process, by profile."""
    kinds = ["SuperLink", "node", "server app", "worker"]
    table = [["profile", *kinds]]
    for profile, measured in stored("flower.json")["calls"].items():
        peaks = measured["peak_mb"]
        table.append([f"`{profile}`", *(f"{peaks[kind] / 1000:.1f} GB" for kind in kinds)])
    return table


def gpu_training() -> Table:
    """Return images per second of local training on a GPU."""
    heading = ["local training, images per second", "plain loop", "barter", "ratio"]
    table = [[*heading, "PyTorch's graphs"]]
    loops = {row["work"]: row for row in stored("speed.json")["rows"]}
    for row in stored("speed-fused.json")["rows"]:
        loop = loops[row["work"]]
        ratio = row["barter"] / loop["peers"]
        ceiling = loop["ceiling"]
        cells = [f"{loop['peers']:,.0f}", f"{row['barter']:,.0f}", f"{ratio:.1f}"]
        table.append([row["work"], *cells, "-" if ceiling is None else f"{ceiling:,.0f}"])
    return table


def cpu_training() -> Table:
    """Return images per second of local training on a CPU."""
    table = [["images per second", "plain loop", "one after the other", "side by side", "ratio"]]
    for row in stored("speed-cpu.json")["rows"]:
        _, size, steps, _ = row["work"].split(", ")
        speeds = [row[key] for key in ("peers", "one_after_the_other", "barter")]
        what = f"{size}, {steps.replace(' a turn', ' per client')}"
        table.append([what, *(f"{speed:,.0f}" for speed in speeds), f"{row['ratio']:.2f}"])
    return table


def phases() -> Table:
    """Return the seconds of a DFFKE round by phase."""
    keys = ("learn", "unify", "decoder", "teach", "exchange", "evaluate")
    table = [["networks", *keys, "round", "GB"]]
    labels = {
        "default, resnet18, 64 px": "ResNet-18, 64 px",
        "default, resnet18, 128 px": "ResNet-18, 128 px",
    }
    measured = stored("speed.json")["round"]
    for name, label in labels.items():
        seconds = measured[name]
        cells = [f"{seconds[key]:.1f}" for key in keys]
        table.append([label, *cells, f"**{seconds['round']:.1f}**", f"{seconds['memory_gb']:.1f}"])
    return table


def clients_speed() -> Table:
    """Return the seconds of a DFFKE round by the number of clients, with all peers and with four."""
    table = [["K", "round", "exchange", "round, `peers = 4`", "exchange"]]
    measured = stored("speed-clients.json")["clients"]
    for clients, everybody in measured["all peers"].items():
        few = measured["peers = 4"].get(clients)
        cells = [f"{everybody[phase]:.1f} s" for phase in ("round", "exchange")]
        cells += ["-" if few is None else f"{few[phase]:.1f} s" for phase in ("round", "exchange")]
        table.append([clients, *cells])
    return table


def kernels() -> Table:
    """Return the microseconds of a training step by kind of kernel."""
    kinds = {
        "convolution": "convolution",
        "normalisation": "normalisation",
        "elementwise": "elementwise",
        "optimizer": "Adam",
        "other": "other",
    }
    table = [["kernels", *kinds.values(), "sum", "side by side"]]
    for name, spent in stored("speed-kernels.json")["kernels"].items():
        microseconds = [spent[kind] for kind in kinds]
        numbers = [*microseconds, sum(microseconds), spent["images_per_second"]]
        cells = [f"{number:,.0f}" for number in numbers]
        table.append([name.removesuffix(" kernels"), *cells])
    return table


def threads() -> Table:
    """Return the milliseconds of a step of one program and of two, by how threads wait."""
    measured = stored("threads.json")["milliseconds"]
    table = [["ms per step", *(f"threads {way}" for way in measured)]]
    for programs, label in {"1": "one program", "2": "two"}.items():
        table.append([label, *(f"{times[programs]:.1f}" for times in measured.values())])
    return table


def execution() -> Table:
    """Return images per second by the way in which steps are executed."""
    ways = ("eager", "compile", "compile-overhead", "graphs", "kernels", "compile-graphs")
    table = [["images per second", *ways, "preparing, graphs / kernels / compile"]]
    labels = {
        "resnet18-32": "10 x ResNet-18, 32 px",
        "small-resnet-32": "10 x small-resnet, 32 px",
        "resnet18-128": "10 x ResNet-18, 128 px",
    }
    measured = stored("speed-execution.json")["execution"]
    for name, label in labels.items():
        found = measured[name]
        speeds = [
            f"{found[way]['images_per_second']:,.0f}" if way in found else "-" for way in ways
        ]
        prepared = [
            f"{found[way]['prepare_seconds']:.1f}"
            for way in ("graphs", "kernels", "compile-graphs")
            if way in found
        ]
        table.append([label, *speeds, f"{' / '.join(prepared)} s"])
    return table


TABLES: dict[str, Callable[[], Table]] = {
    "overview": overview,
    "dffke-wire-bytes": encoded_traffic,
    "dffke-levels-traffic": traffic_by_level,
    "privacy-attacks-digits": lambda: attacks("digits"),
    "privacy-attacks-fashion": lambda: attacks("fashion-2k"),
    "privacy-attacks-short": attacks_in_short,
    "privacy-malformed-answers": malformed_answers,
    "privacy-attacks-levels": levels_under_attack,
    "privacy-epsilon": epsilon,
    "private-statistics": private_statistics,
    "decoded-images": decoded_images,
    "copy-interval": copy_interval,
    "embedding-sizes": embedding_sizes,
    "adversaries-digits": lambda: adversarial_clients("digits"),
    "adversaries-fashion": lambda: adversarial_clients("fashion"),
    "clients-cpu": clients_cpu,
    "clients-gpu": clients_gpu,
    "digits-20-rounds": digits_20_rounds,
    "encodings": encodings,
    "htfllib": beside_htfllib,
    "wire-digits": wire_profiles,
    "fedzge-statistics": fedzge_statistics,
    "submodels-statistics": submodels_statistics,
    "time-mobile": simulated_time,
    "overhead-methods": overhead,
    "overhead-protection": protection,
    "flower-calls": flower_calls,
    "flower-calls-polling": flower_calls_polling,
    "flower-rounds": lambda: flower_rounds("flower.json"),
    "flower-rounds-polling": lambda: flower_rounds("flower.json", "flower-polling.json"),
    "flower-rounds-supernode": lambda: flower_rounds("flower-supernode.json"),
    "flower-megabytes": flower_megabytes,
    "flower-memory": flower_memory,
    "speed-gpu": gpu_training,
    "speed-cpu": cpu_training,
    "speed-phases": phases,
    "speed-clients": clients_speed,
    "speed-kernels": kernels,
    "speed-threads": threads,
    "speed-execution": execution,
}
