//! What is shipped for whom: platforms, the names by which packages know them, and what a library may ask of a system there.
//!
//! A library that asks for more than [`Platform::system`] names would load on the machine that built it and not on another.

use crate::binary::Needs;
use crate::shell::Failure;

/// A platform that wheels and the C library are made for.
#[derive(Debug)]
pub(crate) struct Platform {
    /// As the tag of a wheel ends.
    pub(crate) name: &'static str,
    /// As rustc names it.
    pub(crate) triple: &'static str,
    /// What maturin is asked for, where there is a choice.
    pub(crate) compatibility: Option<&'static str>,
    /// Whether NVIDIA's driver is there.
    pub(crate) has_cuda: bool,
    /// The libraries that every such system has.
    system: &'static [&'static str],
    /// The newest glibc or the oldest macOS that may be asked for.
    newest: (u32, u32),
}

const GLIBC: [&str; 8] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];
/// musl's, under the names by which Alpine and others have it. No libgcc_s, which they need not have.
const MUSL: [&str; 3] = ["libc.so", "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1"];
const MACOS: [&str; 3] = ["/usr/lib/libSystem.B.dylib", "/usr/lib/libiconv.2.dylib", "/usr/lib/libcharset.1.dylib"];
/// Of Windows 10, its C library among them, and Python's own.
const WINDOWS: [&str; 16] = [
    "kernel32.dll",
    "ntdll.dll",
    "msvcrt.dll",
    "userenv.dll",
    "ws2_32.dll",
    "advapi32.dll",
    "bcrypt.dll",
    "bcryptprimitives.dll",
    "api-ms-win-core-synch-l1-2-0.dll",
    "api-ms-win-crt-heap-l1-1-0.dll",
    "api-ms-win-crt-math-l1-1-0.dll",
    "api-ms-win-crt-runtime-l1-1-0.dll",
    "api-ms-win-crt-stdio-l1-1-0.dll",
    "api-ms-win-crt-string-l1-1-0.dll",
    "vcruntime140.dll",
    "python3.dll",
];

/// Debian 10, RHEL 8, Ubuntu 18.10.
const OLD_GLIBC: (u32, u32) = (2, 28);

/// Every platform, that of CI first.
pub(crate) const PLATFORMS: [Platform; 6] = [
    Platform {
        name: "manylinux_2_28_x86_64",
        triple: "x86_64-unknown-linux-gnu",
        compatibility: Some("manylinux_2_28"),
        has_cuda: true,
        system: &GLIBC,
        newest: OLD_GLIBC,
    },
    Platform {
        name: "manylinux_2_28_aarch64",
        triple: "aarch64-unknown-linux-gnu",
        compatibility: Some("manylinux_2_28"),
        has_cuda: true,
        system: &GLIBC,
        newest: OLD_GLIBC,
    },
    Platform {
        name: "musllinux_1_2_x86_64",
        triple: "x86_64-unknown-linux-musl",
        compatibility: Some("musllinux_1_2"),
        has_cuda: false,
        system: &MUSL,
        newest: (0, 0),
    },
    Platform {
        name: "macosx_11_0_arm64",
        triple: "aarch64-apple-darwin",
        compatibility: None,
        has_cuda: false,
        system: &MACOS,
        newest: (11, 0),
    },
    Platform {
        name: "macosx_10_12_x86_64",
        triple: "x86_64-apple-darwin",
        compatibility: None,
        has_cuda: false,
        system: &MACOS,
        newest: (10, 12),
    },
    Platform {
        name: "win_amd64",
        triple: if cfg!(windows) { "x86_64-pc-windows-msvc" } else { "x86_64-pc-windows-gnu" },
        compatibility: None,
        has_cuda: true,
        system: &WINDOWS,
        newest: (0, 0),
    },
];

/// The platform that this program was built for; that of CI on one that nothing is shipped for.
pub(crate) fn here() -> &'static Platform {
    let system = if cfg!(target_os = "macos") {
        "apple-darwin"
    } else if cfg!(windows) {
        "windows"
    } else {
        "linux-gnu"
    };
    let fits = |of: &&Platform| of.triple.starts_with(std::env::consts::ARCH) && of.triple.contains(system);
    PLATFORMS.iter().find(fits).unwrap_or(&PLATFORMS[0])
}

/// All of them, or the one of this name; none where it is one of `others`.
pub(crate) fn named(only: Option<&str>, others: &[&str]) -> Result<Vec<&'static Platform>, Failure> {
    let found: Vec<&Platform> = PLATFORMS.iter().filter(|of| only.is_none_or(|name| name == of.name)).collect();
    if found.is_empty() && !only.is_some_and(|name| others.contains(&name)) {
        let names: Vec<&str> = PLATFORMS.iter().map(|of| of.name).chain(others.iter().copied()).collect();
        return Err(Failure::Usage(format!("--only takes one of {}", names.join(", "))));
    }
    Ok(found)
}

impl Platform {
    /// The glibc that its libraries must load with, where it has one.
    pub(crate) fn oldest_glibc(&self) -> Option<(u32, u32)> {
        self.triple.ends_with("linux-gnu").then_some(self.newest)
    }

    /// The macOS that its libraries must load on, where it is one.
    pub(crate) fn oldest_macos(&self) -> Option<(u32, u32)> {
        self.is_macos().then_some(self.newest)
    }

    fn is_macos(&self) -> bool {
        self.triple.ends_with("apple-darwin")
    }

    /// Whether `tag`, the platform part of a wheel's name, is this one's; several are parted by dots, such as
    /// manylinux_2_17_x86_64.manylinux2014_x86_64, of which the first is the new form.
    pub(crate) fn is_tagged(&self, tag: &str) -> bool {
        let numbers = |tag: &str, prefix: &str| {
            let mut parts = tag.strip_prefix(prefix)?.splitn(3, '_');
            let numbers: (u32, u32) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            Some((numbers, parts.next()?.to_owned()))
        };
        ["manylinux_", "musllinux_", "macosx_"]
            .into_iter()
            .find_map(|prefix| numbers(self.name, prefix).map(|own| (prefix, own)))
            .map_or(tag == self.name, |(prefix, (own, machine))| {
                let asked = tag.split('.').filter_map(|tag| numbers(tag, prefix)).max();
                asked.is_some_and(|(asked, on)| asked <= own && on == machine)
            })
    }

    /// What a library asks for that no such system has, however new.
    pub(crate) fn foreign(&self, file: &str, needs: Option<&Needs>) -> Vec<String> {
        let Some(needs) = needs else { return vec![format!("{file} is no 64-bit library")] };
        let foreign = needs.libraries.iter().filter(|library| !self.system.contains(&library.as_str()));
        let mut wrong: Vec<String> = foreign.map(|library| format!("{file} needs {library}")).collect();
        if !self.triple.starts_with(needs.machine) {
            wrong.push(format!("{file} is for {}", needs.machine));
        }
        wrong
    }

    /// What is wrong with what a library asks for.
    pub(crate) fn wrong_needs(&self, file: &str, needs: Option<&Needs>) -> Vec<String> {
        let mut wrong = self.foreign(file, needs);
        let Some(needs) = needs else { return wrong };
        let (least, what) = if self.is_macos() { (needs.macos(), "macOS") } else { (needs.glibc(), "glibc") };
        if let Some((major, minor)) = least.filter(|least| *least > self.newest) {
            let (newest, newer) = self.newest;
            wrong.push(format!("{file} needs {what} {major}.{minor}, newer than {newest}.{newer}"));
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> &'static Platform {
        super::named(Some(name), &[]).unwrap()[0]
    }

    #[test]
    fn a_platform_that_nothing_is_shipped_for_is_refused_with_those_that_are() {
        let Err(Failure::Usage(text)) = super::named(Some("win_arm64"), &["sources"]) else {
            panic!("must be refused")
        };
        assert!(text.contains("win_amd64") && text.contains("sources"), "{text}");
        assert!(super::named(Some("sources"), &["sources"]).unwrap().is_empty());
        assert_eq!(super::named(None, &[]).unwrap().len(), PLATFORMS.len());
    }

    #[test]
    fn a_tag_is_that_of_the_platform_or_of_an_older_system() {
        let is = |name: &str, tag: &str| named(name).is_tagged(tag);
        assert!(is("manylinux_2_28_x86_64", "manylinux_2_17_x86_64.manylinux2014_x86_64"));
        assert!(is("manylinux_2_28_x86_64", "manylinux_2_28_x86_64"));
        assert!(!is("manylinux_2_28_x86_64", "manylinux_2_34_x86_64"));
        assert!(!is("manylinux_2_28_x86_64", "manylinux_2_28_aarch64"));
        assert!(!is("manylinux_2_28_x86_64", "linux_x86_64"));
        assert!(is("musllinux_1_2_x86_64", "musllinux_1_2_x86_64"));
        assert!(!is("musllinux_1_2_x86_64", "manylinux_2_17_x86_64"));
        assert!(is("macosx_11_0_arm64", "macosx_11_0_arm64"));
        assert!(!is("macosx_11_0_arm64", "macosx_12_0_arm64"));
        assert!(is("win_amd64", "win_amd64") && !is("win_amd64", "win_arm64"));
    }

    #[test]
    fn needs_beyond_the_c_library_are_named() {
        let of = |libraries: &[&str], version: &str| Needs {
            machine: "x86_64",
            libraries: libraries.iter().map(|name| (*name).to_owned()).collect(),
            versions: [version.to_owned()].into(),
            ..Needs::default()
        };
        let linux = &PLATFORMS[0];
        let needs = of(&["libc.so.6", "libtorch_cpu.so", "libpython3.11.so.1.0"], "GLIBC_2.34");
        let wrong = linux.wrong_needs("rapt/_native.abi3.so", Some(&needs)).join("\n");
        assert!(wrong.contains("libtorch_cpu.so") && wrong.contains("libpython3.11") && wrong.contains("glibc 2.34"));
        assert_eq!(wrong.lines().count(), 3);
        assert_eq!(linux.foreign("rapt/_native.abi3.so", Some(&needs)), wrong.lines().take(2).collect::<Vec<_>>());
        assert_eq!(linux.wrong_needs("x.so", None).len(), 1);
        let wrong = |name: &str, needs: &Needs| named(name).wrong_needs("x", Some(needs));
        assert_eq!(wrong("manylinux_2_28_aarch64", &of(&["libc.so.6"], "GLIBC_2.28")), ["x is for x86_64"]);
        assert_eq!(wrong("musllinux_1_2_x86_64", &of(&["libgcc_s.so.1"], "")), ["x needs libgcc_s.so.1"]);
        let on_macos = of(&["/usr/lib/libSystem.B.dylib"], "macos_13.0");
        assert_eq!(wrong("macosx_10_12_x86_64", &on_macos), ["x needs macOS 13.0, newer than 10.12"]);
        assert_eq!(
            wrong("win_amd64", &of(&["libgcc_s_seh-1.dll", "kernel32.dll"], "")),
            ["x needs libgcc_s_seh-1.dll"]
        );
    }

    #[test]
    fn each_platform_has_a_name_and_a_triple_of_its_own() {
        for (n, platform) in PLATFORMS.iter().enumerate() {
            assert!(PLATFORMS[..n].iter().all(|of| of.name != platform.name && of.triple != platform.triple));
            assert!(platform.is_tagged(platform.name));
        }
        assert!(here().triple.starts_with(std::env::consts::ARCH) || !cfg!(target_arch = "x86_64"));
    }
}
