"Everything that can be set stands in `settings.ini`; this file only hands it to setuptools."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

def words(key): return cfg.get(key, "").split()

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], license="Apache-2.0",
    author=cfg["author"], author_email=cfg["author_email"], keywords=cfg["keywords"].split(), url=cfg["git_url"],
    long_description=(here / "README.md").read_text(encoding="utf-8") if (here / "README.md").exists() else "",
    long_description_content_type="text/markdown", python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=["rlworkbench", "rlworkbench.*"]), include_package_data=True,
    package_data={"rlworkbench": ["data/**/*"]},
    install_requires=words("requirements"),
    extras_require={"dev": words("dev_requirements"), "gpu": words("gpu_requirements")},
    entry_points={"console_scripts": words("console_scripts")}, zip_safe=False,
    classifiers=["Programming Language :: Python :: 3", "License :: OSI Approved :: Apache Software License"],
)
