//! Gives the shared library its soname: `librapt.so.0.1` for 0.1.x, `librapt.so.1` for 1.x, as cargo-c would.
//!
//! So that a plain `cargo build` and `cargo xtask c` make the library that `cargo cinstall` makes. On macOS it is looked for as `@rpath/librapt.dylib`.
//! Deliberately absent: Windows, where a file's name takes the place of the soname.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of = |name: &str| std::env::var(name).unwrap_or_default();
    let is_elf = of("CARGO_CFG_TARGET_FAMILY").contains("unix") && of("CARGO_CFG_TARGET_VENDOR") != "apple";
    if is_elf {
        let [major, minor, patch] = ["MAJOR", "MINOR", "PATCH"].map(|part| of(&format!("CARGO_PKG_VERSION_{part}")));
        // What a SemVer reader may rely on: everything before the first number that is not zero, and that number.
        let version = match (major.as_str(), minor.as_str()) {
            ("0", "0") => format!("0.0.{patch}"),
            ("0", minor) => format!("0.{minor}"),
            (major, _) => major.to_owned(),
        };
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,librapt.so.{version}");
    } else if of("CARGO_CFG_TARGET_OS") == "macos" {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-install_name,@rpath/librapt.dylib");
    }
}
