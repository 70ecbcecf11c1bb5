# A template of a Homebrew formula. Before use: write the address and the checksum of a release's source archive
# (`make dist`, `shasum -a 256 dist/*.tar.gz`) below, then let `brew update-python-resources edgespec` add the packages.
class Edgespec < Formula
  include Language::Python::Virtualenv

  desc "Run language models that are too big for your machine, with exactly their own output"
  homepage "HOMEPAGE"
  url "ADDRESS/edgespec-1.0.0.tar.gz"
  sha256 "CHECKSUM"
  license all_of: ["Apache-2.0", "MIT"]

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "rust" => :build
  depends_on "python@3.13"

  def install
    ENV["CMAKE_ARGS"] = "-DCMAKE_PROJECT_llama_cpp_INCLUDE=#{buildpath}/scripts/packaging/libraries.cmake"
    virtualenv_install_with_resources
  end

  service do
    run [opt_bin/"edgespec", "serve"]
    keep_alive crashed: true
    process_type :interactive
    environment_variables EDGESPEC_SERVE_PORT: "8080"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/edgespec --version")
  end
end
