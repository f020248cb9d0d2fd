//! Compiles the kernels that a package ships: `ship FOLDER [KEPT]`, with NVRTC where `RAPT_NVRTC` says or where it is found.
//!
//! FOLDER receives one file per architecture; KEPT remembers what was compiled before, so that a second run takes a moment.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args_os().skip(1).map(PathBuf::from);
    let folder = words.next().ok_or("usage: ship FOLDER [KEPT]")?;
    for wrote in rapt_cuda::ship(&folder, words.next().as_deref())? {
        let (major, minor) = wrote.compiler;
        let (arch, bytes) = (wrote.arch.name(), wrote.file_bytes);
        println!("{arch}: {} kernels by NVRTC {major}.{minor}, {bytes} bytes", wrote.kernels);
    }
    Ok(())
}
