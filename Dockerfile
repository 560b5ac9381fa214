# `mie serve`, for CPUs of x86-64 and aarch64. EXTRAS=all,cuda12 or all,cuda13 adds NVIDIA GPUs.
#
#     docker build -t mie .
#     docker build -t mie:cuda12 --build-arg EXTRAS=all,cuda12 .
FROM docker.io/library/python:3.12-slim
ARG EXTRAS=all
COPY pyproject.toml README.md LICENSE /src/
COPY mie /src/mie
RUN pip install --no-cache-dir "/src[$EXTRAS]" && rm -r /src
# The folder of downloads and compiled kernels, which a volume may keep.
RUN useradd --uid 10001 --create-home mie && install -d -o mie /home/mie/.cache
USER 10001
WORKDIR /home/mie
EXPOSE 8000
ENTRYPOINT ["mie", "serve", "--host", "0.0.0.0"]
CMD ["bundled"]
