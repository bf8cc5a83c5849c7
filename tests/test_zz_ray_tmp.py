import runpy, sys
import pytest, ray
from pathlib import Path
from tiny_training import *
EX=Path("/work/main/examples")
@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))
@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()
def go(monkeypatch, name, *args):
    monkeypatch.setattr(sys,"argv",[name,*map(str,args)])
    runpy.run_path(str(EX/name), run_name="__main__")
def test_gen(world,tmp_path,monkeypatch,capsys):
    c=save_config(tmp_path/"c.yaml",world,data={"folder":str(tmp_path/"data")})
    go(monkeypatch,"ray_generate.py","--actors",2,"--config",c)
    print(capsys.readouterr().out[-300:])
def test_train(world,tmp_path,monkeypatch,capsys):
    c=save_config(tmp_path/"c.yaml",world)
    go(monkeypatch,"ray_train.py","--workers",2,"--storage",tmp_path/"ray","--config",c)
    print(capsys.readouterr().out[-300:])
    import os; os.system(f"find {tmp_path}")
