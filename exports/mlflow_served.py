"""Loads a logged decoder by MLflow's "models from code": MLflow copies and runs this file; nothing is pickled."""

from mlflow.models import set_model

from arbordraft.exports.mlflow_model import DecoderModel

set_model(DecoderModel())
