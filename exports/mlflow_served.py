"""What MLflow copies into a logged decoder and runs to load it: "models from code", nothing is pickled."""

from mlflow.models import set_model

from arbordraft.exports.mlflow_model import DecoderModel

set_model(DecoderModel())
