//! Compiles the kernels that a package ships: `ship core|whole FOLDER [KEPT]`, with NVRTC where `RAPT_NVRTC` says or where it is
//! found.
//!
//! FOLDER receives one file per architecture; KEPT remembers what was compiled before, so that a second run takes a moment.

use std::path::PathBuf;

use rapt_cuda::Assortment;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const USAGE: &str = "usage: ship core|whole FOLDER [KEPT]";
    let mut words = std::env::args_os().skip(1);
    let assortment = match words.next().as_deref().and_then(std::ffi::OsStr::to_str) {
        Some("core") => Assortment::Core,
        Some("whole") => Assortment::Whole,
        _ => return Err(USAGE.into()),
    };
    let mut folders = words.map(PathBuf::from);
    let folder = folders.next().ok_or(USAGE)?;
    for wrote in rapt_cuda::ship(&folder, assortment, folders.next().as_deref())? {
        let (major, minor) = wrote.compiler;
        let (arch, bytes) = (wrote.arch.name(), wrote.file_bytes);
        println!("{arch}: {} kernels by NVRTC {major}.{minor}, {bytes} bytes", wrote.kernels);
    }
    Ok(())
}
