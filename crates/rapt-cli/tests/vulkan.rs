//! `rapt run --device vulkan`, `rapt bench --device vulkan` and the adapters of `rapt doctor`, in builds with the backend.
//!
//! Without an adapter nothing is tested, which is printed, and is a failure if `RAPT_REQUIRE` names `vulkan` (`cargo xtask vulkan`).
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rapt::reference::{Inputs, Problem, naive};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const LEN: usize = 70;
const DIM: usize = 8;

fn rapt(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rapt")).args(args).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn has_adapter() -> bool {
    if !rapt::vulkan::adapters().is_empty() {
        return true;
    }
    let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == "vulkan"), "RAPT_REQUIRE asks for vulkan: there is no adapter");
    println!("no Vulkan adapter: nothing is tested");
    false
}

/// Sixteenths in −1..1.
fn numbers(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|n| (((n * 7 + seed * 13) * 37 % 33) as f64 - 16.0) / 16.0).collect()
}

/// A folder of this test alone, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let name = format!("vulkan-{test}-{}", std::process::id());
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).expect("a folder for files");
        Folder(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path of text").to_owned()
    }

    fn write(&self, name: &str, descr: &str, shape: &str, data: &[u8]) -> String {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let mut bytes = vec![0x93, b'N', b'U', b'M', b'P', b'Y', 1, 0];
        bytes.extend(u16::try_from(header.len()).expect("a short header").to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        std::fs::write(self.path(name), bytes).expect("a file");
        self.path(name)
    }

    fn floats(&self, name: &str, heads: usize, numbers: &[f64]) -> String {
        let data: Vec<u8> = numbers.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.write(name, "<f4", &format!("(1, {heads}, {}, {DIM})", numbers.len() / heads / DIM), &data)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn read(path: &str) -> Vec<f64> {
    let bytes = std::fs::read(path).expect("a file");
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[start..].chunks(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().expect("four bytes")))).collect()
}

fn off(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let off: f64 = got.iter().zip(expected).map(|(got, expected)| (got - expected).powi(2)).sum();
    let whole: f64 = expected.iter().map(|expected| expected.powi(2)).sum();
    (off / whole).sqrt()
}

#[test]
fn files_are_attended_to_on_the_device() {
    if !has_adapter() {
        return;
    }
    let folder = Folder::new("files");
    let (q, k) = (numbers(1, HEADS * 2 * DIM), numbers(2, KV_HEADS * LEN * DIM));
    let v = numbers(3, k.len());
    let (q_file, k_file) = (folder.floats("q.npy", HEADS, &q), folder.floats("k.npy", KV_HEADS, &k));
    let v_file = folder.floats("v.npy", KV_HEADS, &v);
    let (out, lse) = (folder.path("out.npy"), folder.path("lse.npy"));
    let problem = Problem { num_kv_heads: KV_HEADS, ..Problem::plain(1, HEADS, 2, LEN, DIM) };
    let expected = naive(&problem, &Inputs::plain(&q, &k, &v));
    for device in ["vulkan", "vulkan:0"] {
        let done = rapt(&["run", &q_file, &k_file, &v_file, &out, "--lse", &lse, "--device", device]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let said = text(&done.stdout);
        assert!(said.ends_with("out.npy: float32 [1, 4, 2, 8], decode float32 on wgsl\n"), "{said}");
        assert!(off(&read(&out), &expected.out) < 1e-6 && off(&read(&lse), &expected.lse) < 1e-6);
        std::fs::remove_file(&out).expect("what was written");
    }

    let bytes: Vec<u8> = q.iter().flat_map(|x| x.to_le_bytes()).collect();
    let double = folder.write("double.npy", "<f8", &format!("(1, {HEADS}, 2, {DIM})"), &bytes);
    let refused = rapt(&["run", &double, &double, &double, &out, "--device", "vulkan:0"]);
    assert_eq!(refused.status.code(), Some(1));
    let error = text(&refused.stderr);
    assert!(error.contains("WGSL has no 64-bit floats") && !Path::new(&out).exists(), "{error}");
}

#[test]
fn doctor_lists_adapters_with_what_they_lack() {
    if !has_adapter() {
        return;
    }
    let report: serde_json::Value = serde_json::from_str(&text(&rapt(&["doctor", "--json"]).stdout)).expect("JSON");
    let row = report["vulkan"]["vulkan:0"].as_str().expect("the first adapter");
    let name = &rapt::vulkan::adapters()[0].name;
    assert!(row.starts_with(name.as_str()) && row.contains("MiB; ") && row.contains("lack"), "{row}");
    assert!(row.contains("; compiled kernels kept "), "{row}");
    assert!(text(&rapt(&["doctor"]).stdout).contains("vulkan:0"));
}

#[test]
fn bench_checks_and_times_every_kernel_that_serves_a_row() {
    if !has_adapter() {
        return;
    }
    let folder = Folder::new("bench");
    let file = folder.path("bench.json");
    let row = ["bench", "--device", "vulkan:0", "--shape", "1,4,40,90,16", "--kv-heads", "2", "--seconds", "0.02"];
    let done = rapt(&[&row[..], &["--causal", "--json", &file]].concat());
    let table = text(&done.stdout);
    assert!(done.status.success(), "{table} {}", text(&done.stderr));
    assert!(table.contains("1,4/2,40,90,16 causal") && table.contains("by the device's clock"), "{table}");
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).expect("the figures")).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    let kernels: Vec<&str> = rows.iter().map(|row| row["kernel"].as_str().expect("a kernel")).collect();
    assert_eq!(kernels, ["forward", "generic"]);
    for (at, row) in rows.iter().enumerate() {
        assert_eq!((row["correct"].as_bool(), row["is_selected"].as_bool()), (Some(true), Some(at == 0)), "{row}");
        let timing = &row["timing"];
        assert!(timing["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{row}");
        assert!(timing["share_of_fma"].as_f64().is_some_and(|share| share > 0.0 && share < 1.0), "{row}");
        assert_eq!(timing["rounds_seconds"].as_array().map(Vec::len), Some(5));
    }
    let refused = rapt(&[&row[..], &["--mask", "bool"]].concat());
    assert!(text(&refused.stderr).contains("without masks and codes"), "{}", text(&refused.stderr));
}
