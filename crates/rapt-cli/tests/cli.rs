//! The command line as its users see it: what it prints, what it writes, and its exit codes.
#![allow(missing_docs)]

use std::path::PathBuf;
use std::process::{Command, Output};

fn rapt(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rapt"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RAPT_")) {
        command.env_remove(name);
    }
    command.args(args).envs(variables.iter().copied()).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// Standard output of a call that must succeed.
fn prints(args: &[&str]) -> String {
    let output = rapt(args, &[]);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Standard error of a call that must fail with `code`.
fn refuses(args: &[&str], variables: &[(&str, &str)], code: i32) -> String {
    let output = rapt(args, variables);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output.stdout));
    assert!(output.stdout.is_empty(), "nothing is printed beside the error");
    text(&output.stderr)
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&prints(args)).expect("JSON")
}

/// A folder of this test alone, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for files");
        Folder(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path of text").to_owned()
    }

    fn write(&self, name: &str, descr: &str, fortran: bool, shape: &str, data: &[u8]) -> String {
        let order = if fortran { "True" } else { "False" };
        let header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
        let mut bytes = vec![0x93, b'N', b'U', b'M', b'P', b'Y', 1, 0];
        bytes.extend(u16::try_from(header.len()).expect("a short header").to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        std::fs::write(self.file(name), bytes).expect("a file");
        self.file(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The elements of a file that `run` wrote.
fn read(path: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("a file");
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[start..].chunks(4).map(|x| f32::from_le_bytes(x.try_into().expect("four bytes"))).collect()
}

#[test]
fn doctor_tests_itself_and_shows_what_is_there() {
    let report = json(&["doctor", "--json"]);
    assert_eq!(report["ok"], true, "{report}");
    let tests = report["self_test"].as_array().unwrap();
    assert_eq!(tests.len(), 8, "four dtypes by two kernels");
    assert!(tests.iter().all(|test| test["passed"] == true && test["error"].as_f64().unwrap() >= 0.0));
    let isas = report["isa_available"].as_array().unwrap();
    assert!(isas.contains(&report["isa"]) && isas.contains(&"scalar".into()));

    let table = prints(&["doctor"]);
    for word in
        ["RAPT_NUM_THREADS", "RAPT_ISA", "RAPT_LOG", "not set", "self-test bfloat16 decode", "available_parallelism"]
    {
        assert!(table.contains(word), "{word}: {table}");
    }
}

#[test]
fn doctor_obeys_and_prints_the_variables() {
    // In two parts: it is no variable of Rapt, and tidy lists all of them.
    let misspelt = concat!("RAPT_", "TREADS");
    let variables = [("RAPT_NUM_THREADS", "3"), ("RAPT_ISA", "scalar"), (misspelt, "4")];
    let output = rapt(&["doctor"], &variables);
    assert!(output.status.success());
    let table = text(&output.stdout);
    for word in ["3 (from RAPT_NUM_THREADS)", "scalar (available", "\"4\" (no variable of Rapt)"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let error = refuses(&["doctor"], &[("RAPT_ISA", "avx1024")], 1);
    assert!(error.contains("RAPT_ISA") && error.contains("allowed: scalar"), "{error}");
    let error = refuses(&["doctor"], &[("RAPT_NUM_THREADS", "0")], 1);
    assert!(error.contains("RAPT_NUM_THREADS") && error.contains("from 1 up"), "{error}");
}

#[test]
fn doctor_shows_every_variable_of_the_documentation() {
    let table = include_str!("../../../docs/reference/environment.md");
    let documented = table.lines().filter_map(|line| line.strip_prefix("| `RAPT_")?.split_once('`'));
    let documented: Vec<String> = documented.map(|(name, _)| format!("RAPT_{name}")).collect();
    let report = json(&["doctor", "--json"]);
    let printed: Vec<&String> = report["environment"].as_object().unwrap().keys().collect();
    assert_eq!(documented.len(), printed.len());
    assert!(documented.iter().all(|name| printed.contains(&name)), "{documented:?} {printed:?}");
}

#[test]
fn explain_prints_the_plan() {
    let table =
        prints(&["explain", "--shape", "1,32,1,8192,128", "--kv-heads", "8", "--dtype", "bf16", "--threads", "2"]);
    for word in ["decode bfloat16", "heads 32 / 8", "bytes_copied", "0 (no tensor is materialised)", "8192"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let plan = json(&[
        "explain",
        "--shape",
        "2,12,77,90,64",
        "--head-dim-v",
        "40",
        "--causal",
        "bottom_right",
        "--window",
        "16,none",
        "--softcap",
        "30",
        "--mask",
        "bool",
        "--layout",
        "bshd",
        "--json",
    ]);
    assert_eq!((&plan["kernel"], &plan["bytes_copied"]), (&"forward".into(), &0.into()));
    assert_eq!(plan["words"]["q strides"], "[59136, 64, 768, 1]");
    assert_eq!(
        plan["words"]["positions"],
        "causal bottom_right, diagonal at j = i + 13; window left 16, right unbounded"
    );
}

#[test]
fn explain_certifies_what_is_described_and_says_that_it_is_declared() {
    let shape = ["explain", "--shape", "2,4,10,12,8", "--kv-heads", "2", "--mask", "bool"];
    let table = prints(&shape);
    for words in ["in bounds", "declared, not proven", "640 elements at 640 addresses", "80 rows = "] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let plan = json(&[&shape[..], &["--json"]].concat());
    let certificate = &plan["certificate"];
    let tensors: Vec<&str> =
        certificate["in_bounds"].as_array().unwrap().iter().map(|fact| fact["tensor"].as_str().unwrap()).collect();
    assert_eq!(tensors, ["q", "k", "v", "mask", "out"]);
    assert!(certificate["in_bounds"].as_array().unwrap().iter().all(|fact| fact["extent"] == "declared"));
    assert_eq!(certificate["in_bounds"][4]["bytes"], serde_json::json!([0, 2560]));
    assert_eq!(certificate["injective"], serde_json::json!([{"tensor": "out", "elements": 640, "steps": 0}]));
    assert_eq!(certificate["disjoint"].as_array().unwrap().len(), 4);
    assert_eq!(certificate["coverage"]["rows"], 80);
}

#[test]
fn explain_describes_codes() {
    let shape = ["explain", "--shape", "1,8,4,1000,72", "--kv-heads", "2"];
    let plan = json(&[&shape[..], &["--kv-codes", "int8:token", "--dtype", "bf16", "--json"]].concat());
    let of = serde_json::json!({
        "format": "int8", "granularity": "token", "block_size": null, "code_bytes": 144_000, "scale_bytes": 8000,
    });
    assert_eq!((&plan["codes"]["k"], &plan["codes"]["v"], &plan["codes"]["q"]), (&of, &of, &serde_json::Value::Null));
    assert_eq!(plan["storage"], "bfloat16");
    let k = "int8 codes, a scale for each token; 144,000 bytes of codes, 8,000 of scales";
    assert_eq!(plan["words"]["k codes"], k);
    let tensors: Vec<&str> = plan["certificate"]["in_bounds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|fact| fact["tensor"].as_str().unwrap())
        .collect();
    assert_eq!(tensors, ["q", "k", "v", "k_descale", "v_descale", "out"]);

    // Every format, in both layouts; blocks whose last one is shorter; rows of an odd number of codes.
    for (q, k, v) in [
        ("e4m3fn:tensor", "uint8:head", "int4:block:32"),
        ("nvfp4", "mxfp4", "mxfp8"),
        ("int4", "e5m2:channel", "uint8:block:7"),
    ] {
        for layout in ["bhsd", "bshd"] {
            let codes = ["--q-codes", q, "--k-codes", k, "--v-codes", v, "--head-dim-v", "37", "--layout", layout];
            let table = prints(&[&shape[..], &codes, &["--dtype", "float16"]].concat());
            for (row, name) in [("q codes", q), ("k codes", k), ("v codes", v)] {
                let words = format!("{} codes, a scale", name.split(':').next().unwrap());
                assert!(table.lines().any(|line| line.contains(row) && line.contains(&words)), "{row} {name}: {table}");
            }
            assert!(table.contains("float16"), "out has the dtype that is asked: {table}");
        }
    }
    let swizzled = prints(&[&shape[..], &["--kv-codes", "nvfp4:swizzled"]].concat());
    assert!(
        swizzled
            .contains("nvfp4 codes, a scale for each block of 16, swizzled; 72,000 bytes of codes, 16,388 of scales"),
        "{swizzled}"
    );
    let check = |more: &[&str], code, expect: &str| {
        let error = refuses(&[&shape[..], more].concat(), &[], code);
        assert!(error.contains(expect), "{error}");
    };
    check(&["--k-codes", "mxfp8:swizzled", "--layout", "bshd"], 1, "'plain', or layout 'bhsd'");
    check(&["--k-codes", "int8:token:swizzled"], 2, "the scales of int8 are float32");
    check(&["--k-codes", "int7"], 2, "the known are int8, uint8, int4, e4m3fn, e5m2, mxfp8, mxfp4, nvfp4");
    check(&["--k-codes", "nvfp4:token"], 2, "granularity = token; allowed: None, or block 16: those of nvfp4");
    check(&["--kv-codes", "int8", "--v-codes", "int8"], 2, "cannot be used with");
    check(&["--kv-codes", "int8", "--dtype", "f64"], 1, "q in float64 with k of int8 codes is not served");
    check(&["--k-codes", "int8", "--dtype", "int8"], 1, "q is int8 codes");
}

#[test]
fn products_of_int8_are_described_where_they_are_asked_for() {
    let shape =
        ["explain", "--shape", "1,8,64,1000,72", "--kv-heads", "2", "--dtype", "bf16", "--k-codes", "int8:token"];
    let by_channel = [&shape[..], &["--v-codes", "int8:channel"]].concat();
    let table = prints(&[&by_channel[..], &["--compute", "int8"]].concat());
    assert!(table.contains("forward_int8 bfloat16") && table.contains("int8, an approximation"), "{table}");
    assert!(!prints(&by_channel).contains("approximation"));
    let check = |more: &[&str], code, expect: &str| {
        let error = refuses(&[&shape[..], more].concat(), &[], code);
        assert!(error.contains(expect), "{error}");
    };
    check(&["--compute", "int8"], 1, "quantize v to int8 by tensor, head or channel");
    check(&["--v-codes", "int8:token", "--compute", "int8"], 1, "with v of int8 codes by token");
    check(&["--v-codes", "int8:channel", "--compute", "fp8"], 1, "compute=\"fp8\" on cpu");
    check(&["--compute", "int4"], 2, "exact, int8, fp8");
}

#[test]
fn explain_refuses_with_the_cause() {
    let shape = ["explain", "--shape", "1,8,16,16,64"];
    let check = |more: &[&str], code, expect: &str| {
        let error = refuses(&[&shape[..], more].concat(), &[], code);
        assert!(error.contains(expect), "{error}");
    };
    let hint = "without q_descale: nothing is assumed in its place; say --q-codes int8:token, with --dtype that of the numbers";
    check(&["--dtype", "int8"], 1, &format!("q is int8 codes, which are no numbers {hint}"));
    check(&["--dtype", "int64"], 1, "float64, float32, float16, bfloat16");
    check(&["--kv-heads", "3"], 1, "must be a multiple");
    check(&["--softcap", "-1"], 1, "greater than 0");
    check(&["--scale", "inf"], 1, "any finite number");
    check(&["--threads", "0"], 1, "a number from 1 up");
    check(&["--dtype", "float7"], 2, "the known dtypes are");
    check(&["--causal", "middle"], 2, "bottom_right");
    check(&["--window", "3"], 2, "two ends");
    let error = refuses(&["explain", "--shape", "1,8,16"], &[], 2);
    assert!(error.contains("got 3"), "{error}");
    let error = refuses(&["explain", "--shape", "9999999999,9999999999,1,1,64"], &[], 1);
    assert!(error.contains("overflows"), "{error}");
}

#[test]
fn the_support_table_is_markdown_and_complete() {
    let table = prints(&["explain", "--support-table"]);
    assert!(table.contains("| plain ") && table.contains("| float8_e4m3fn ") && table.contains("scalar"));
    assert!(table.lines().all(|line| line == line.trim_end()));
}

#[test]
fn run_computes_files_and_reads_fortran_order_in_place() {
    let folder = Folder::new("run");
    // Equal keys: the mean of the values.
    let q = folder.write("q.npy", "<f4", false, "(1, 1, 2)", &floats(&[1.0, 0.5]));
    let k = folder.write("k.npy", "<f4", false, "(1, 2, 2)", &floats(&[0.5, 1.0, 0.5, 1.0]));
    let v = folder.write("v.npy", "<f4", false, "(1, 2, 2)", &floats(&[0.25, 0.75, 0.75, 0.25]));
    let v_turned = folder.write("vt.npy", "<f4", true, "(1, 2, 2)", &floats(&[0.25, 0.75, 0.75, 0.25]));
    let mask = folder.write("mask.npy", "|b1", false, "(2,)", &[1, 0]);
    let (out, lse) = (folder.file("out.npy"), folder.file("lse.npy"));

    let said = prints(&["run", &q, &k, &v, &out, "--lse", &lse]);
    assert!(said.contains("float32 [1, 1, 2], decode float32"), "{said}");
    assert_eq!(read(&out), [0.5, 0.5]);
    let expected = 1.0 / 2f64.sqrt() + 2f64.ln();
    assert!((f64::from(read(&lse)[0]) - expected).abs() < 1e-6);

    prints(&["run", &q, &k, &v_turned, &out]);
    assert_eq!(read(&out), [0.5, 0.5]);
    prints(&["run", &q, &k, &v, &out, "--mask", &mask]);
    assert_eq!(read(&out), [0.25, 0.75]);
    prints(&["run", &q, &k, &v, &out, "--causal"]);
    assert_eq!(read(&out), [0.25, 0.75], "top left: the one query sees the first key");
    prints(&["run", &q, &k, &v, &out, "--causal", "bottom_right"]);
    assert_eq!(read(&out), [0.5, 0.5]);
}

#[test]
fn run_refuses_files_and_problems_and_writes_nothing() {
    let folder = Folder::new("refuse");
    let q = folder.write("q.npy", "<f4", false, "(1, 1, 2)", &floats(&[1.0, 0.5]));
    let long = folder.write("long.npy", "<f4", false, "(1, 1, 3)", &floats(&[1.0; 3]));
    let wide = folder.write("wide.npy", "<f8", false, "(1, 1, 2)", &[0; 16]);
    let whole = folder.write("whole.npy", "<i8", false, "(1, 1, 2)", &[0; 16]);
    let out = folder.file("out.npy");
    let check = |k: &str, expect: &str| {
        let error = refuses(&["run", &q, k, &q, &out], &[], 1);
        assert!(error.contains(expect), "{error}");
        assert!(!PathBuf::from(&out).exists());
    };
    check(&long, "k has head_dim 3, q has 2");
    check(&wide, "k has dtype float64, q has float32");
    check(&whole, "k has dtype int64, q has float32");
    check(&folder.file("absent.npy"), "absent.npy: ");
    let error = refuses(&["run", &q, &q, &q, &out, "--device", "vulkan:4711"], &[], 1);
    assert!(error.contains("vulkan:4711 is not available"), "{error}");
    // The program beside the tests is the last one built, which may have the feature.
    let hint = "cargo feature `vulkan`. Install it: cargo install rapt-cli --features vulkan\n";
    assert!(error.ends_with(hint) || error.contains("there is no Vulkan adapter 4711"), "{error}");
    for (given, named) in [("cuda:0", "cuda:0"), ("mps", "mps:0")] {
        let error = refuses(&["run", &q, &q, &q, &out, "--device", given], &[], 1);
        assert!(error.contains(&format!("{named} is not available: tensors of the host")), "{error}");
    }
    let error = refuses(&["run", &q, &q, &q, &out, "--device", "tpu"], &[], 2);
    assert!(error.contains("allowed are cpu, vulkan and vulkan:N"), "{error}");
}

#[test]
fn run_takes_codes_and_their_factors_from_files() {
    let folder = Folder::new("codes");
    let q = folder.write("q.npy", "<f4", false, "(1, 1, 2)", &floats(&[1.0, 0.5]));
    // 2·(0.25, 0.5) and 0.5·(2, −1) as int8; the same as int4, e4m3fn and nvfp4, each with its factors.
    let (k, k_factors) = ([1.0, 2.0, 4.0, -2.0].map(|x: f32| x as i8 as u8), floats(&[0.5, 0.25]));
    let numbers = floats(&[0.5, 1.0, 1.0, -0.5]);
    let numbers = folder.write("numbers.npy", "<f4", false, "(1, 2, 2)", &numbers);
    let int8 = folder.write("int8.npy", "|i1", false, "(1, 2, 2)", &k);
    let int8_turned = folder.write("int8t.npy", "|i1", true, "(1, 2, 2)", &[k[0], k[2], k[1], k[3]]);
    let token = folder.write("token.npy", "<f4", false, "(1, 2)", &k_factors);
    let uint8 = folder.write("uint8.npy", "|u1", false, "(1, 2, 2)", &k.map(|code| code.wrapping_add(9)));
    let nines = folder.write("nines.npy", "|u1", false, "(1, 2)", &[9, 9]);
    let int4 = folder.write("int4.npy", "|u1", false, "(1, 2, 1)", &[0x21, 0xe4]);
    let e4m3fn = folder.write("e4m3fn.npy", "|u1", false, "(1, 2, 2)", &[0x38, 0x40, 0x48, 0xc0]);
    let nvfp4 = folder.write("nvfp4.npy", "|u1", false, "(1, 2, 1)", &[0x42, 0xc6]);
    let blocks = folder.write("blocks.npy", "|u1", false, "(1, 2, 1)", &[0x38, 0x30]);
    let out = folder.file("out.npy");
    let run = |k: &str, v: &str, more: &[&str]| {
        let said = prints(&[&["run", &q, k, v, &out][..], more].concat());
        assert!(said.contains("float32 [1, 1, 2]"), "{said}");
        read(&out)
    };
    let expected = run(&numbers, &numbers, &[]);
    for (file, codes, more) in [
        (&int8, None, &[][..]),
        (&int8_turned, Some("int8:token"), &[]),
        (&uint8, None, &["--k-zero-point", &nines, "--v-zero-point", &nines]),
        (&int4, Some("int4"), &[]),
        (&e4m3fn, Some("e4m3fn:token"), &[]),
    ] {
        let codes = codes.map_or(vec![], |codes| vec!["--kv-codes", codes]);
        let parts = ["--k-descale", &token, "--v-descale", &token];
        assert_eq!(run(file, file, &[&codes[..], &parts, more].concat()), expected, "{file}");
    }
    // 0.5·(1, 2) and 0.25·(4, −2): of e2m1 1, 2, 4 and −2; blocks of 1 and 0.5, and 0.5 for the tensor.
    let parts = ["--v-codes", "nvfp4", "--v-descale", &blocks, "--v-global-scale", "0.5"];
    assert_eq!(run(&numbers, &nvfp4, &parts), expected);
    // The same factors swizzled: that of the second row stands at 16.
    let mut flat = [0x7f; 512];
    (flat[0], flat[16]) = (0x38, 0x30);
    let flat = folder.write("flat.npy", "|u1", false, "(1, 512)", &flat);
    let parts = ["--v-codes", "nvfp4:swizzled", "--v-descale", &flat, "--v-global-scale", "0.5"];
    assert_eq!(run(&numbers, &nvfp4, &parts), expected);
    let q_codes = ["run", &int8, &numbers, &numbers, &out, "--q-descale", &token];
    assert!(prints(&[&q_codes[..], &["--out-dtype", "float16"]].concat()).contains("float16 [1, 2, 2]"));

    std::fs::remove_file(&out).expect("it was written");
    let check = |k: &str, more: &[&str], expect: &str| {
        let error = refuses(&[&["run", &q, k, &numbers, &out][..], more].concat(), &[], 1);
        assert!(error.contains(expect), "{error}");
        assert!(!PathBuf::from(&out).exists());
    };
    let none = "which are no numbers without";
    check(
        &int8,
        &[],
        &format!("k is int8 codes, {none} k_descale: nothing is assumed in its place; say --k-descale FILE"),
    );
    check(&uint8, &["--k-descale", &token], &format!("k is uint8 codes, {none} k_zero_point"));
    check(&nvfp4, &["--k-codes", "nvfp4", "--k-descale", &blocks], "say --k-global-scale X");
    check(
        &int8,
        &["--k-descale", &token, "--k-zero-point", &nines],
        "k_zero_point was given, and int8 codes have none",
    );
    let three = folder.write("three.npy", "<f4", false, "(1, 3)", &floats(&[1.0; 3]));
    check(
        &int8,
        &["--k-descale", &three],
        "k_descale has shape [1, 3], which scales of numbers of shape [1, 2, 2] do not have",
    );
    check(&int8, &["--k-descale", &nines], "k_descale has dtype uint8, asked for is float32");
    check(&int8, &["--k-descale", &token, "--k-codes", "int8:head"], "k_descale has shape [1, 2]");
    check(&numbers, &["--k-descale", &token], "k_descale = given; allowed: none: k has dtype float32");
    check(&numbers, &["--k-descale", &token, "--k-codes", "int8"], "k has dtype float32, asked for is int8");
    let error = refuses(&q_codes, &[], 1);
    assert!(error.contains("q is int8 codes, which name no dtype of out; say --out-dtype float32"), "{error}");
}

#[test]
fn run_judges_heads_by_a_tolerance() {
    let folder = Folder::new("tolerance");
    // One head of each of two batch entries; the second asks for sharp differences.
    let q = folder.write("q.npy", "<f4", false, "(2, 1, 1, 2)", &floats(&[0.1, 0.2, 300.0, -200.0]));
    let x = floats(&[0.26, 0.5, 1.0, -0.49, 0.26, 0.5, 1.0, -0.49]);
    let x = folder.write("x.npy", "<f4", false, "(2, 1, 2, 2)", &x);
    let codes = [1.0, 2.0, 4.0, -2.0, 1.0, 2.0, 4.0, -2.0].map(|x: f32| x as i8 as u8);
    let codes = folder.write("codes.npy", "|i1", false, "(2, 1, 2, 2)", &codes);
    let token = folder.write("token.npy", "<f4", false, "(2, 1, 2)", &floats(&[0.25; 4]));
    let (out, plain) = (folder.file("out.npy"), folder.file("plain.npy"));
    let parts = ["--k-descale", &token, "--v-descale", &token];
    let run = |out: &str, more: &[&str]| prints(&[&["run", &q, &codes, &codes, out][..], &parts, more].concat());
    let originals = ["--k-original", &x, "--v-original", &x];
    let said = run(&out, &[&["--tolerance", "0.5"][..], &originals].concat());
    assert!(said.contains("tolerance: 5e-1 (relative L2); heads on the codes 1, on the originals 1"), "{said}");
    assert!(said.contains("worst estimate") && said.contains("rigorous bound"), "{said}");
    assert!(!run(&plain, &[]).contains("tolerance:"));
    let on_codes = read(&plain);
    prints(&["run", &q, &x, &x, &plain]);
    assert_eq!(read(&out), [&on_codes[..2], &read(&plain)[2..]].concat());

    std::fs::remove_file(&out).expect("it was written");
    let check = |k: &str, more: &[&str], expect: &str| {
        let error = refuses(&[&["run", &q, k, &codes, &out][..], more].concat(), &[], 1);
        assert!(error.contains(expect), "{error}");
        assert!(!PathBuf::from(&out).exists());
    };
    let says = "k carries no measured errors. Quantize it with keep_original or measure_errors; say --k-original FILE";
    check(&codes, &[&["--tolerance", "0.5"][..], &parts].concat(), says);
    check(&codes, &[&["--tolerance", "-1"][..], &parts, &originals].concat(), "tolerance = -1; allowed");
    let says = "k_original = given; allowed: none: k has dtype float32";
    check(&x, &[&["--tolerance", "0.5"][..], &parts[2..], &originals].concat(), says);
    refuses(&["run", &q, &codes, &codes, &out, "--k-original", &x], &[], 2);
}

#[test]
fn bench_measures_codes() {
    let folder = Folder::new("bench-codes");
    let json = folder.file("out.json");
    let table = prints(&[
        "bench",
        "--shape",
        "1,4,20,40,32",
        "--shape",
        "1,4,1,300,32",
        "--kv-heads",
        "2",
        "--k-codes",
        "int8:token",
        "--v-codes",
        "nvfp4",
        "--threads",
        "2",
        "--seconds",
        "0.02",
        "--json",
        &json,
    ]);
    assert!(table.contains("1,4/2,20,40,32 k int8 by token v nvfp4 by block 16"), "{table}");
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&json).expect("a file")).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert!(rows.len() == 2 && rows.iter().all(|row| row["correct"] == true && row["codes"]["k"]["format"] == "int8"));
    let head = ["bench", "--shape", "1,4,20,40,32", "--layout", "bshd", "--k-codes", "int8:head"];
    assert!(refuses(&head, &[], 1).contains("in 'bshd' the last two dimensions are no head"));
}

#[test]
fn bench_measures_shapes_of_ones_own() {
    let folder = Folder::new("bench");
    let (json, svg) = (folder.file("out.json"), folder.file("out.svg"));
    let table = prints(&[
        "bench",
        "--shape",
        "1,4,40,40,16",
        "--shape",
        "1,4,1,300,16",
        "--kv-heads",
        "2",
        "--dtype",
        "f32,bf16",
        "--causal",
        "bottom_right",
        "--mask",
        "bool",
        "--layout",
        "bshd",
        "--threads",
        "2",
        "--seconds",
        "0.02",
        "--json",
        &json,
        "--svg",
        &svg,
    ]);
    for part in
        ["1,4/2,40,40,16 bottom_right bool mask bshd", "bfloat16", "decode", "% peak", "% DRAM", "floor", "2 threads"]
    {
        assert!(table.contains(part), "{part} is missing:\n{table}");
    }

    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&json).expect("a file")).expect("JSON");
    assert_eq!(report["threads"], 2);
    let rows = report["rows"].as_array().expect("rows");
    let found: Vec<_> = rows.iter().map(|row| (row["dtype"].as_str(), row["kernel"].as_str())).collect();
    let (forward, decode) = (Some("forward"), Some("decode"));
    let (single, half) = (Some("float32"), Some("bfloat16"));
    assert_eq!(found, [(single, forward), (single, decode), (half, forward), (half, decode)]);
    for row in rows {
        assert_eq!(row["correct"], true, "{row:#}");
        assert!(row["error"].as_f64() <= row["error_limit"].as_f64());
        let number = |name: &str| row["timing"][name].as_f64().unwrap_or(f64::NAN);
        let (seconds, rate) = (number("seconds"), number("flops_per_second"));
        assert!(seconds > 0.0 && (row["flops"].as_f64().unwrap() / seconds / rate - 1.0).abs() < 1e-9);
        assert!((rate / number("products_flops_per_second") / number("share_of_products") - 1.0).abs() < 1e-9);
        // What is far above a ceiling says that it is none.
        assert!(number("share_of_products") < 3.0, "{row:#}");
        let read = number("bytes_per_second") / number("dram_read_bytes_per_second");
        assert!((read / number("share_of_dram") - 1.0).abs() < 1e-9);
        assert!(number("floor_cycles_per_score") > 0.0 && number("clock_hz") > 1e8 && number("calls") >= 5.0);
        assert_eq!(row["timing"]["rounds_seconds"].as_array().map(Vec::len), Some(5));
    }
    let plot = std::fs::read_to_string(&svg).expect("a file");
    assert!(plot.contains("<svg") && plot.contains("1,4/2,1,300,16") && plot.contains("% DRAM"));
}

#[test]
fn bench_refuses_what_no_row_is() {
    for (args, part) in [
        (&["bench", "--shape", "1,2,3"][..], "5 sizes are needed"),
        (&["bench", "--shape", "1,2,3,4,5", "--seconds", "-1"], "--seconds"),
        (&["bench", "--dtype", "float31"], "the known dtypes are"),
        (&["bench", "--kv-heads", "2"], "--shape"),
    ] {
        assert!(refuses(args, &[], 2).contains(part), "{args:?}");
    }
    for (args, part) in [
        (&["bench", "--shape", "1,3,4,4,8", "--kv-heads", "2"][..], "3"),
        (&["bench", "--shape", "1,1,4,4,8", "--dtype", "int8"], "say --q-codes int8:token"),
        (&["bench", "--shape", "1,1,4,4,0"], "head_dim"),
        (&["bench", "--shape", "1,1,4,4,8", "--threads", "0"], "threads"),
    ] {
        assert!(refuses(args, &[], 1).contains(part), "{args:?}");
    }
}
