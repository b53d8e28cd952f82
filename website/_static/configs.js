/** Which of the page's models a config.json is: where the two differ in what decides about memory. */

const REFUSED = ["quantization_config", "auto_map"]; // weights of fewer bits, and code of one's own

/**
 * What differs, as [field, there, here]; empty where a training takes the same bytes.
 * @param {object} given a config.json's content
 * @param {object} model of the index: its `config`, and of what its type has where a file is silent, `defaults`
 */
export function differences(given, { config, defaults }) {
  const there = { ...defaults, ...given };
  there.num_key_value_heads ??= there.num_attention_heads;
  there.head_dim ??= there.hidden_size / there.num_attention_heads;
  if (!there.use_sliding_window && "use_sliding_window" in config) there.sliding_window = null;
  const found = Object.entries(config).filter(([name, value]) => JSON.stringify(there[name]) !== JSON.stringify(value));
  const extra = REFUSED.filter((name) => given[name]).map((name) => [name, "given", "none"]);
  return [...found.map(([name, value]) => [name, there[name], value]), ...extra];
}

/**
 * The nearest of the models of the same type, by name, with what differs.
 * @throws {SyntaxError} where the text is no config.json of a type that the page has
 */
export function nearest(text, models) {
  const given = JSON.parse(text);
  const types = [...new Set(Object.values(models).map(({ config }) => config.model_type))];
  if (!types.includes(given?.model_type)) throw new SyntaxError(`its model_type is none of ${types.join(", ")}`);
  const same = Object.entries(models).filter(([, { config }]) => config.model_type === given.model_type);
  const found = same.map(([name, model]) => [name, differences(given, model)]);
  return found.sort(([, one], [, other]) => one.length - other.length)[0];
}
