"""Serves SmolLM2-135M-Instruct like `arbordraft serve`, also with a trained drafter beside lookups in the text."""

import argparse
from pathlib import Path

import arbordraft
from arbordraft import Engine, builders
from arbordraft.decoding.measuring import rows_within
from arbordraft.drafter_names import load_drafter
from arbordraft.serving.app import build_app
from arbordraft.serving.server import Server, bound
from arbordraft.serving.service import Service

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--name", required=True, help="name of the model for clients")
parser.add_argument("--drafter", default="none", help="none, ngram, or the folder of a trained drafter")
arguments = parser.parse_args()

target = arbordraft.load("smollm2", "none", dtype="bfloat16", costs=None).target
match arguments.drafter:
    case "none":
        decoder = builders.plain(target)
    case "ngram":
        decoder = builders.lookup(target)
    case folder:
        decoder = builders.cost_aware(target, load_drafter(Path(folder), target), lookup=True)
engine = Engine(decoder, max_rows=rows_within(target))
app = build_app(Service(engine, arguments.name))
Server(app).run(sockets=[bound("127.0.0.1", arguments.port)])
