//! The npm package: WebAssembly by rustc, JavaScript and types by tsc, tested in Node, in Dawn and in headless Chromium.
//!
//! ```text
//! rapt-web (wasm32) ──cargo rustc──► rapt.wasm, rapt-simd128.wasm ─┐
//! package/src/*.ts  ──tsc──────────► *.js, *.d.ts ─► target/web/package ─► node --test, dawn.mjs, Chromium on SwiftShader
//! testkit's suite   ──cargo build──► suite.wasm, which calls the package
//! npm ci            ─► target/web/npm, where the tests are copied: no node_modules lies in the tree
//! debian.rs         ─► target/web/chromium, where none is installed
//! ```
//! Deliberately absent: a bundler, and wasm-bindgen's tool.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::args::Args;
use crate::metadata::{Workspace, root};
use crate::shell::{Failure, Outcome, capture, cargo, command, copy, read, say, show, step, write};
use crate::{debian, licenses};

pub(crate) const HELP: &str = "\
cargo xtask web [--build | --node] [--whole]

Builds the npm package into target/web/package and tests it: its CPU kernels in Node, the text of every kernel in Dawn, and all of it in
headless Chromium on SwiftShader; with the page of the documentation, if `cargo xtask docs` has built it.

  --build   only builds
  --node    only builds, and tests in Node
  --whole   with the tests that take minutes on a processor";

const FOLDER: &str = "bindings/web";
const TARGET: &str = "wasm32-unknown-unknown";
/// The profile of the workspace that the module is built with.
const PROFILE: &str = "web";
/// The name of the package in the registry.
const PACKAGE: &str = "rapt-attention";

/// Most bytes of the module and of the whole package, unpacked.
const MOST_MODULE: u64 = 1_400_000;
const MOST_PACKAGE: u64 = 2_700_000;

/// The modules, and what they are compiled with: vectors are an instruction set of the whole module.
const MODULES: [(&str, &str); 2] = [("rapt.wasm", "-simd128"), ("rapt-simd128.wasm", "+simd128")];

/// The folders of a build.
struct Folders {
    package: PathBuf,
    npm: PathBuf,
    suite: PathBuf,
    chromium: PathBuf,
    site: PathBuf,
    pictures: PathBuf,
}

impl Folders {
    fn new() -> Result<Self, Failure> {
        let target = Workspace::load()?.target;
        let web = target.join("web");
        Ok(Folders {
            package: web.join("package"),
            npm: web.join("npm"),
            suite: target.join(TARGET).join(PROFILE).join("examples/suite.wasm"),
            chromium: web.join("chromium"),
            site: target.join("site"),
            pictures: target.join("site-pictures"),
        })
    }
}

pub(crate) fn run(mut args: Args) -> Outcome {
    let (is_build, is_node, is_whole) = (args.flag("--build"), args.flag("--node"), args.flag("--whole"));
    args.finish(HELP)?;
    let folders = Folders::new()?;
    build(&folders)?;
    if is_build { Ok(()) } else { tests(&folders, is_node, is_whole) }
}

/// A part of `cargo xtask test --gpu`.
pub(crate) fn whole() -> Outcome {
    let folders = Folders::new()?;
    build(&folders)?;
    tests(&folders, false, true)
}

fn tests(folders: &Folders, is_node: bool, is_whole: bool) -> Outcome {
    step("build the suite", || {
        let mut build = cargo(["build", "-p", "rapt-web", "--example", "suite", "--features", "suite"]);
        show(build.args(["--target", TARGET, "--profile", PROFILE]).current_dir(root()))
    })?;
    copy(&root().join(FOLDER).join("tests"), &folders.npm.join("tests"))?;
    for (name, _) in MODULES {
        let mut node = test(folders, "node.test.mjs", is_whole);
        step(&format!("test {name} in Node"), || show(node.env("WEB_MODULE", name)))?;
    }
    if is_node {
        return Ok(());
    }
    let chromium = step("unpack Chromium", || Chromium::found(folders))?;
    step("compile every kernel in Dawn", || dawn(folders, &chromium))?;
    step("test in Chromium", || in_chromium(folders, &chromium, is_whole))
}

/// The package, in its folder.
fn build(folders: &Folders) -> Outcome {
    step("add the target", || {
        let has = capture(Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]))?;
        if Path::new(has.trim()).is_dir() { Ok(()) } else { show(&mut command("rustup", ["target", "add", TARGET])) }
    })?;
    let modules = target()?.join("web");
    std::fs::create_dir_all(&modules).map_err(Failure::file(&modules))?;
    for (name, features) in MODULES {
        step(&format!("build {name}"), || module(features, &modules.join(name)))?;
    }
    let (source, target) = (root().join(FOLDER).join("package"), &folders.npm);
    std::fs::create_dir_all(target).map_err(Failure::file(target))?;
    step("npm ci", || {
        let lock = read(&source.join("package-lock.json"))?;
        let is_current = read(&target.join("node_modules/.installed")).is_ok_and(|installed| installed == lock);
        for file in ["package.json", "package-lock.json"] {
            std::fs::copy(source.join(file), target.join(file)).map_err(Failure::file(&source.join(file)))?;
        }
        if is_current {
            return Ok(());
        }
        show(command("npm", ["ci", "--ignore-scripts", "--no-audit", "--no-fund"]).current_dir(target))?;
        write(&target.join("node_modules/.installed"), &lock)
    })?;
    step("tsc", || {
        let _ = std::fs::remove_dir_all(&folders.package);
        copy(&source.join("src"), &target.join("src"))?;
        let config = target.join("tsconfig.json");
        std::fs::copy(source.join("tsconfig.json"), &config).map_err(Failure::file(&config))?;
        let tsc = target.join("node_modules/typescript/bin/tsc");
        show(command("node", [tsc]).arg("--outDir").arg(&folders.package).current_dir(target))
    })?;
    fill(folders, &source)?;
    check_sizes(&folders.package)
}

fn target() -> Result<PathBuf, Failure> {
    Ok(Workspace::load()?.target)
}

/// The module, built with these features of its target.
fn module(features: &str, into: &Path) -> Outcome {
    let mut build = cargo(["rustc", "-p", "rapt-web", "--lib", "--crate-type", "cdylib", "--locked"]);
    let flags = format!("target.{TARGET}.rustflags=[\"-Ctarget-feature={features}\"]");
    show(build.args(["--target", TARGET, "--profile", PROFILE, "--config", &flags]).current_dir(root()))?;
    let built = target()?.join(TARGET).join(PROFILE).join("rapt_web.wasm");
    std::fs::copy(&built, into).map(drop).map_err(Failure::file(&built))
}

/// What the package has besides its JavaScript.
fn fill(folders: &Folders, source: &Path) -> Outcome {
    let workspace = Workspace::load()?;
    let put = |from: &Path, name: &str| {
        std::fs::copy(from, folders.package.join(name)).map(drop).map_err(Failure::file(from))
    };
    MODULES.into_iter().try_for_each(|(name, _)| put(&workspace.target.join("web").join(name), name))?;
    put(&source.join("README.md"), "README.md")?;
    ["LICENSE-MIT", "LICENSE-APACHE"].into_iter().try_for_each(|name| put(&root().join(name), name))?;
    write(&folders.package.join(licenses::FILE), &licenses::of_wheel(&workspace, "rapt-web", PACKAGE)?)?;
    let of_json = |error: serde_json::Error| Failure::Check(format!("package.json: {error}"));
    let mut manifest: Value = serde_json::from_str(&read(&source.join("package.json"))?).map_err(of_json)?;
    if let Some(manifest) = manifest.as_object_mut() {
        // What builds and tests it is nothing to whoever installs it.
        manifest.remove("devDependencies");
    }
    let version = workspace.members().find(|member| member.name == "rapt-web").map(|member| member.version.clone());
    if manifest["version"].as_str() != version.as_deref() {
        return Err(Failure::Check(format!(
            "package.json has version {}, the workspace {version:?}",
            manifest["version"]
        )));
    }
    write(&folders.package.join("package.json"), &serde_json::to_string_pretty(&manifest).map_err(of_json)?)
}

fn check_sizes(package: &Path) -> Outcome {
    let size = |path: &Path| std::fs::metadata(path).map(|of| of.len()).map_err(Failure::file(path));
    let entries = std::fs::read_dir(package).map_err(Failure::file(package))?;
    let files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let whole = files.iter().map(|path| size(path)).sum::<Result<u64, _>>()?;
    let mut sizes = vec![("the package", whole, MOST_PACKAGE)];
    for (name, _) in MODULES {
        sizes.push((name, size(&package.join(name))?, MOST_MODULE));
    }
    for (what, has, most) in sizes {
        say(format_args!("{what}: {has} bytes"));
        if has > most {
            return Err(Failure::Check(format!("{what} has {has} bytes, at most {most} are meant")));
        }
    }
    Ok(())
}

/// Node on a file of tests, told where everything lies.
fn test(folders: &Folders, file: &str, is_whole: bool) -> Command {
    let mut node = command("node", ["--test", "--test-reporter=spec"]);
    node.arg(folders.npm.join("tests").join(file)).current_dir(&folders.npm);
    node.env("WEB_PACKAGE", &folders.package).env("WEB_SUITE", &folders.suite).env("WEB_PAGES", root().join("docs"));
    if is_whole {
        node.env("RAPT_WHOLE", "1");
    }
    node
}

/// A browser.
struct Chromium {
    folder: PathBuf,
    /// What it needs besides where it is not installed.
    libraries: Vec<PathBuf>,
}

impl Chromium {
    /// The one that is installed, or one that is unpacked.
    fn found(folders: &Folders) -> Result<Self, Failure> {
        let installed = PathBuf::from("/usr/lib/chromium");
        if installed.join("chromium").is_file() {
            return Ok(Chromium { folder: installed, libraries: Vec::new() });
        }
        if let Some(missing) = debian::missing() {
            let why = format!("no Chromium is installed, and {missing} is missing, which would fetch one");
            return Err(Failure::Check(why));
        }
        let tree = debian::unpacked(&folders.chromium, &["chromium"])?;
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/pulseaudio"];
        let libraries = libraries.map(|folder| tree.join(folder)).to_vec();
        Ok(Chromium { folder: tree.join("usr/lib/chromium"), libraries })
    }
}

/// Dawn in Node, on the driver that Chromium brings.
fn dawn(folders: &Folders, chromium: &Chromium) -> Outcome {
    let mut node = command("node", ["tests/dawn.mjs"]);
    node.arg(&folders.package).current_dir(&folders.npm);
    node.env("LD_LIBRARY_PATH", debian::library_path([chromium.folder.clone()])?);
    show(node.env("VK_ICD_FILENAMES", chromium.folder.join("vk_swiftshader_icd.json")))
}

fn in_chromium(folders: &Folders, Chromium { folder, libraries }: &Chromium, is_whole: bool) -> Outcome {
    let mut node = test(folders, "browser.test.mjs", is_whole);
    node.env("WEB_CHROMIUM", folder.join("chromium")).env("WEB_PICTURES", &folders.pictures);
    if !libraries.is_empty() {
        node.env("LD_LIBRARY_PATH", debian::library_path(libraries.clone())?);
    }
    if folders.site.join("start/browser.html").is_file() {
        std::fs::create_dir_all(&folders.pictures).map_err(Failure::file(&folders.pictures))?;
        copy(&folders.package, &folders.site.join("web"))?;
        node.env("WEB_SITE", &folders.site);
    }
    show(&mut node)
}
