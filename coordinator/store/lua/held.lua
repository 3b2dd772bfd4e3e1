-- ARGV: worker id, incarnation, kept_ms, the tier that workers share; then tier, key of a block, and whether it is held, of each.
-- Returns 0 if that worker is not the current one. A block's holders are a line, the newest first.
local known = redis.call('HMGET', key('node:', ARGV[1]), 'incarnation', 'term')
if known[1] ~= ARGV[2] or known[2] == '0' then return 0 end
for i = 5, #ARGV, 3 do
  local name, is_held = key('held:', ARGV[i + 1]), ARGV[i + 2] == '1'
  local item = (ARGV[i] == ARGV[4] and '*' or known[2]) .. ':' .. ARGV[i]
  local line = redis.call('GET', name)
  local holders = is_held and {item} or {}
  for other in string.gmatch(line or '', '%S+') do
    if other ~= item and #holders < MAX_HELD_BY then holders[#holders + 1] = other end
  end
  if is_held then
    redis.call('SET', name, table.concat(holders, ' '), 'PX', ARGV[3])
  elseif #holders == 0 then
    redis.call('DEL', name)
  elseif line then
    redis.call('SET', name, table.concat(holders, ' '), 'KEEPTTL')
  end
end
return 1
