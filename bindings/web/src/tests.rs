//! Requests as texts: what is copied, bound and refused. The rest is tested in Node and in browsers, by way of the package.

use serde_json::{Value, json};

use crate::plan::{Answer, plan, source};
use crate::refusal::Refusal;
use crate::request::Request;

fn tensor(buffer: usize, shape: &[usize]) -> Value {
    let bytes = shape.iter().product::<usize>() * 4;
    json!({ "dtype": "float32", "shape": shape, "strides": null, "offset": 0, "buffer": buffer, "begin_bytes": 0, "len_bytes": bytes,
            "is_storage": true })
}

/// Attention of one head, `changes` merged into it.
fn request(changes: &Value) -> Value {
    let options = json!({ "scale": null, "softcap": null, "causal": null, "window": [null, null], "layout": "bhsd", "out_dtype": null,
                          "return_lse": true });
    let mut request = json!({ "q": tensor(0, &[1, 4, 8]), "k": tensor(1, &[1, 6, 8]), "v": tensor(2, &[1, 6, 8]), "options": options,
                              "gpu": null });
    merge(&mut request, changes);
    request
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter().for_each(|(name, value)| merge(into.entry(name.clone()).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}

fn planned(changes: &Value) -> Result<Answer, Refusal> {
    plan(&serde_json::from_value::<Request>(request(changes)).expect("a request"))
}

fn gpu() -> Value {
    json!({ "max_binding_bytes": 128 << 20, "offset_alignment": 256, "max_groups": 65_535, "max_threads": 256,
            "max_shared_bytes": 32_768 })
}

#[test]
fn what_strides_reach_is_copied_and_no_other_byte() {
    let k = json!({ "shape": [1, 6, 8], "strides": [0, -10, 1], "offset": 60, "begin_bytes": 64, "len_bytes": 400 });
    let answer = planned(&json!({ "k": k })).unwrap();
    let of_k = answer.copies.iter().find(|span| span.tensor == "k").unwrap();
    // Elements 10 to 67 of an array that begins at byte 64.
    assert_eq!((of_k.begin_bytes, of_k.len_bytes, of_k.offset), (64 + 40, 58 * 4, 50));
    assert_eq!(answer.bytes_copied, 4 * (32 + 58 + 48 + 32 + 4));
    assert_eq!((answer.out.shape, answer.out.strides), (vec![1, 4, 8], vec![32, 8, 1]));
    assert_eq!(answer.lse.map(|lse| lse.shape), Some(vec![1, 4]));
    assert!(answer.gpu.is_none());
}

#[test]
fn a_gpu_binds_copies_from_their_begin_and_buffers_where_tensors_lie() {
    let copied = planned(&json!({ "gpu": gpu() })).unwrap();
    let gpu_work = copied.gpu.unwrap();
    assert_eq!(gpu_work.windows[0].ranges["k"], (0, 192));
    let k = json!({ "offset": 80, "len_bytes": 1024 });
    let placed = planned(&json!({ "gpu": gpu(), "in_buffers": true, "k": k })).unwrap();
    assert_eq!((placed.bytes_copied, placed.copies.len()), (0, 0));
    // Element 80 lies at byte 320: bound from 256 on.
    assert_eq!(placed.gpu.unwrap().windows[0].ranges["k"], (256, 64 + 192));
    let names: Vec<&str> = gpu_work.kernels.iter().map(|kernel| kernel.entry).collect();
    assert_eq!(names, ["attention", "attention"], "decode and what folds it");
    assert!(source(&gpu_work.kernels[0].name).unwrap().contains("fn attention("));
    assert!(source("another").is_err());
}

#[test]
fn refusals_have_their_code_and_a_hint() {
    for (changes, code, hint) in [
        (json!({ "k": { "dtype": "float64", "len_bytes": 384 } }), "DtypeMismatchError", "Float32Array.from(k.data)"),
        (json!({ "k": { "dtype": "half" } }), "UnsupportedDtypeError", ""),
        (json!({ "v": { "shape": [1, 5, 8] } }), "ShapeError", "if the rest of"),
        (json!({ "k": { "shape": [1, 1, 1, 1, 1, 1, 1, 1, 1] } }), "ShapeError", "k.shape"),
        (json!({ "k": { "offset": 1 } }), "LayoutError", "stay inside its own data"),
        (json!({ "out": tensor(0, &[1, 4, 8]) }), "LayoutError", "an array of its own"),
        (json!({ "gpu": gpu(), "in_buffers": true, "k": { "is_storage": false } }), "UnsupportedError", ""),
        (json!({ "q": { "begin_bytes": usize::MAX - 7 } }), "UnsupportedError", ""),
    ] {
        let refusal = planned(&changes).unwrap_err();
        assert_eq!(refusal.code, code, "{refusal:?}");
        assert!(refusal.hint.contains(hint), "{refusal:?}");
    }
}
