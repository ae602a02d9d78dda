"""Installs the toolkit and its recipes. No Bazel: there is nothing to compile."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "toolkit/__init__.py").read_text(encoding="utf-8"))[1]

DATASETS = [
    "tensorflow-datasets>=4.9.9,<5",
    # tensorflow-datasets imports it without declaring it.
    "importlib_resources>=6",
    # Later releases need Python 3.11, and older pips search for hours before they see it.
    "etils<1.14; python_version < '3.11'",
]

setuptools.setup(
    name="tf-strategy-toolkit",
    version=VERSION,
    description="Train one unmodified Keras 3 script on several devices with TensorFlow's distribution strategies",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    keywords=["keras", "tensorflow", "distributed training", "tf.distribute", "multi-worker", "parameter server"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=setuptools.find_packages(include=["toolkit", "toolkit.*", "recipes", "recipes.*"]),
    entry_points={"console_scripts": ["toolkit = toolkit.cli.main:main"]},
    package_data={"toolkit": ["py.typed", "cli/templates/*", "observe/report/*.j2", "strategies/upstream/*.csv"]},
    install_requires=[
        "absl-py>=2.1,<3",
        # Functions of notebooks, for toolkit.launch.run.
        "cloudpickle>=3,<4",
        # Where Run(copy_to=...) copies to. Versions are dates; s3fs and gcsfs ask for their own date's.
        "fsspec>=2024.12,<2028",
        # 3.12 is the last Keras for Python 3.10. scripts/test-next tries 3.16 before its release; nothing was tried on
        # what comes after it.
        "keras>=3.12,<3.17",
        "numpy>=2,<3",
        # Other cards than nvidia-smi lists are no concern of ours.
        "nvidia-ml-py>=12.535",
        "lazy-loader>=0.4,<1",
        "packaging>=23",
        "pyyaml>=6,<7",
        "psutil>=6,<8",
        "requests>=2.31,<3",
        "jinja2>=3.1,<4",
        "matplotlib>=3.8,<4",
        "rich>=13.7,<16",
        # Keras's TensorBoard callback needs it, and TensorFlow no longer brings it.
        "tensorboard>=2.19,<3",
        "tensorflow>=2.20,<2.24",
        "tomli>=2; python_version < '3.11'",
        # What runs when a launched script imports TensorFlow.
        "wrapt>=1.14,<3",
    ],
    extras_require={
        "gpu": ["tensorflow[and-cuda]"],
        # CIFAR-10, for recipes with --data=cifar10: 200 MB, which whoever trains on data of their own doesn't need.
        "datasets": DATASETS,
        # Drivers of Run(copy_to="s3://...") and copy_to="gs://...".
        "s3": ["s3fs>=2024.12,<2028"],
        "gcs": ["gcsfs>=2024.12,<2028"],
        # toolkit.strategies.create() and RayReport in the train function of a TensorflowTrainer.
        "ray": ["ray[train]>=2.50,<3"],
        "docs": ["furo>=2024.8.6", "myst-parser>=4,<6", "sphinx>=8,<10"],
        "test": [
            *DATASETS,
            "hypothesis>=6.100,<7",
            # A real notebook that launches.
            "ipykernel>=6,<8",
            "nbclient>=0.10,<1",
            "nbformat>=5,<6",
            # By which other programs read a checkpoint's arrays.
            "safetensors>=0.5,<1",
            # Kubernetes's published schemas, for the manifests.
            "jsonschema>=4,<5",
            "kubernetes-validate>=1.31,<2",
            # A real S3 server over HTTP.
            "moto[server]>=5.1,<6",
            "s3fs>=2024.12,<2028",
            "mypy>=1.15,<3",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.7,<4",
            "ruff>=0.9,<1",
            # Tests make a wheel.
            "setuptools>=70",
            "types-PyYAML",
        ],
        # benchmarks.two_hosts compares with it.
        "bench": ["torch>=2.6,<3"],
    },
)
